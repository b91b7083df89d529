"""Kernels of our own, where the processor and a compiler allow them.

`cpu.c` has them, `compile` makes a library of it once per machine, `cpu` calls it with tensors, and
`modules` puts it to use in Transformers' models, without changing what these compute.
"""
