"""Kernels of our own, where the processor and a compiler allow them.

`cpu.c` has them, `compile` makes a library of it once per machine, and `cpu` calls it with tensors.
"""
