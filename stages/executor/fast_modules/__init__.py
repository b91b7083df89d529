"""Modules of Transformers' models that run with our kernels, and compute what they did before."""
