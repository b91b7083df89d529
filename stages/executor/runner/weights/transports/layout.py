"""The layout of tensors in bytes, shared by both sides of a transport."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ......bus.weights import TensorMeta
from ......config import WeightsError, shown
from ..checks import NUMBERS, UNLIMITED, WeightLimits

_T = TypeVar("_T")

Take = Callable[[str, Tensor], None]
"""Takes a named tensor that has come, which may be freed afterwards."""

Begin = Callable[[Sequence[str]], Take]
"""Takes the names of all tensors that will come."""

_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if dtype in NUMBERS
}

_MOST_BYTES = 1 << 62
"""More than any memory, and within torch's integers."""

_MOST_DIMENSIONS = 64  # torch's limit

_IN_A_GO = 256
"""Items between two yields of the GIL."""


def unhurried(items: Iterable[_T]) -> Iterator[_T]:
    """Iterate over items, and yield the GIL regularly: otherwise other threads would wait for some
    milliseconds each time."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % _IN_A_GO:
            time.sleep(0)


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """Return a message's description of a tensor."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """Raises WeightsError for an unknown dtype."""
    dtype = _DTYPES.get(meta.dtype)
    if dtype is None:
        raise WeightsError(f"{shown(meta.name)} has the unknown dtype {shown(meta.dtype)}")
    return dtype


def num_bytes(meta: TensorMeta) -> int:
    """Raises WeightsError for an impossible shape."""
    itemsize, sizes = dtype_of(meta).itemsize, meta.shape[:_MOST_DIMENSIONS]
    fits = len(sizes) == len(meta.shape) and all(0 <= size <= _MOST_BYTES for size in sizes)
    # A size of 0 makes none of the others possible.
    if fits and itemsize * math.prod(max(size, 1) for size in sizes) <= _MOST_BYTES:
        return itemsize * math.prod(sizes)
    shape = ", ".join(shown(size) for size in sizes)
    raise WeightsError(f"{shown(meta.name)} has the impossible shape ({shape})")


def sizes_of(tensors: Sequence[TensorMeta], limits: WeightLimits = UNLIMITED) -> list[int]:
    """Return the bytes of each tensor.

    Raises:
        WeightsError: A name comes twice, a dtype or shape is invalid, or the limits are exceeded.
    """
    limits.check_tensors(len(tensors))
    names: set[str] = set()
    sizes: list[int] = []
    for meta in unhurried(tensors):
        if meta.name in names:
            raise WeightsError(f"{shown(meta.name)} comes twice")
        names.add(meta.name)
        sizes.append(num_bytes(meta))
    limits.check_bytes(sum(sizes))
    return sizes


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, `[bytes]`, uint8; a view if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_tensor(data: Tensor, meta: TensorMeta) -> Tensor:
    """Return the tensor in these bytes, `[bytes]`, uint8, which must be aligned; a view."""
    return data.view(dtype_of(meta)).view(meta.shape)


def distinct(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without further names of tied parameters."""
    first_names: dict[object, str] = {}
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first_names.setdefault(place if tensor.numel() else name, name)
    return {name: state_dict[name] for name in first_names.values()}


def buckets(tensors: Iterable[TensorMeta], sizes: Iterable[int], most: int) -> list[list[int]]:
    """Group tensors, by index, into buckets of one dtype and at most so many bytes.

    A larger tensor is a bucket of its own, and so is each tensor if `most` is 0. Dtypes are in the
    order of their first tensors, and tensors of a dtype in their own order.
    """
    by_dtype: dict[str, list[list[int]]] = {}
    room: dict[str, int] = {}
    for index, (meta, size) in enumerate(zip(tensors, sizes, strict=True)):
        cut = by_dtype.setdefault(meta.dtype, [])
        if most and cut and size <= room[meta.dtype]:
            cut[-1].append(index)
        else:
            cut.append([index])
            room[meta.dtype] = most
        room[meta.dtype] -= size
    if not most:
        return sorted(bucket for cut in by_dtype.values() for bucket in cut)
    return [bucket for cut in by_dtype.values() for bucket in cut]


def packed_buckets(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Group tensors, by index, as vLLM's packed broadcasts: each ends with the tensor that takes it
    above `most` bytes."""
    found: list[list[int]] = []
    size = most + 1
    for index, more in enumerate(sizes):
        if size > most:
            found.append([])
            size = 0
        found[-1].append(index)
        size += more
    return found


def read_file(file: int, start: int, size: int) -> Tensor:
    """Read a part of an open file, `[bytes]`, uint8, without the GIL.

    Raises:
        WeightsError: The file is too short, or memory is short.
        OSError: It can't be read.
    """
    try:
        data = torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        raise WeightsError(
            f"there is no memory for {size} bytes of new weights",
            remedy="free some, or send fewer at a time",
        ) from None
    rest = memoryview(data.numpy().data)
    while rest:
        count = os.preadv(file, [rest], start + size - len(rest))
        if not count:
            raise WeightsError(
                "the weights were cut off while they were read", remedy="write or send them again"
            )
        rest = rest[count:]
    return data
