"""Modules of Transformers' models that run with our kernels, and compute what they did before.

`patterns` knows them by their parts, `modules` compares and installs, and `decoder` takes all
layers in one call.
"""
