"""Tensors of all kinds, and how to tell whether they came through."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]


def samples(seed: int = 0) -> dict[str, Tensor]:
    """A tensor of each dtype; non-contiguous, scalar and empty ones."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 100

    made = {f"a.{dtype}": random(3, 5).to(dtype) for dtype in DTYPES}
    made["b.turned"] = random(7, 4).t()
    made["b.sliced"] = random(9, 8)[::2, 1:6].bfloat16()
    made["c.scalar"] = random(1)[0]
    made["c.empty"] = torch.empty(0, 4)
    made["d.large"] = random(64, 33)
    made["d.large.again"] = made["d.large"]
    made["d.parameter"] = torch.nn.Parameter(random(4, 4))
    return made


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].tolist() == tensor.tolist()
        for name, tensor in wanted.items()
    )
