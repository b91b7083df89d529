"""Kernels of our own, where the processor and a compiler allow them.

`cpu.c` has those for the CPU, `compile` makes a library of it once per machine, and `cpu` calls it
with tensors. `triton_decode` has the one for CUDA. Nothing here knows models, steps or a KV cache.
"""
