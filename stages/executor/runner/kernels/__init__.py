"""Our kernels, where the processor and a compiler allow them.

`cpu.c` has the CPU kernels, `compile` builds its library once per machine, and `cpu` calls it with
tensors. `triton_decode` has the CUDA kernel. Nothing here depends on models, steps or a KV cache.
"""
