"""Forward passes by our kernels for modules of Transformers' models.

`patterns` matches modules by their parts, `modules` compares and installs passes, and `decoder`
runs all layers in one call.
"""
