"""Tags of operations, which ranks compare."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """Kinds of operations; numbers as in ranks.c, names for errors."""

    all_reduce = 1
    all_gather = 2
    broadcast = 3
    message = 4


def tag_of(kind: Kind, tensor: Tensor) -> int:
    """Return the kind and dtype in the two upper bytes, and the number of bytes in the others.

    Raises:
        ValueError: The tensor isn't contiguous, or has a dtype that ranks don't exchange.
    """
    dtype = _NUMBERS.get(tensor.dtype)
    if dtype is None or not tensor.is_contiguous():
        raise ValueError(f"ranks exchange contiguous tensors of {', '.join(map(str, _DTYPES))}")
    return kind << 56 | dtype << 48 | tensor.nbytes


def described(tag: int) -> str:
    kind, dtype, size_bytes = tag >> 56, tag >> 48 & 0xFF, tag & (1 << 48) - 1
    return f"{Kind(kind).name} of {size_bytes:,} bytes of {_DTYPES[dtype]}"


def out_of_step(rank: int, tag: int, other: int, other_tag: int) -> str:
    return (
        f"rank {rank} and rank {other} are out of step: {described(tag)} and {described(other_tag)}"
    )
