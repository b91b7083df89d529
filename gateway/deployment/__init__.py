"""The gateway of a deployment of several models: the interfaces of each, and what stands before."""
