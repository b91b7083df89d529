"""How tensors lie in bytes that two processes share: what both sides of a transport agree on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ......bus.weights import TensorMeta
from ......config import WeightsError, shown
from ..limits import UNLIMITED, WeightLimits
from ..storage import NUMBERS

_T = TypeVar("_T")

_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if dtype in NUMBERS
}

_MOST_BYTES = 1 << 62
"""More than any memory, and little enough for torch to count."""

_MOST_DIMENSIONS = 64  # torch's, and as many as are shown

_IN_A_GO = 256
"""Tensors."""


def unhurried(items: Iterable[_T]) -> Iterator[_T]:
    """The same items; between them other threads of the process have their turn at once.

    They would anyway, but only after asking for some milliseconds, each time that they had to wait.
    """
    for number, item in enumerate(items, 1):
        yield item
        if not number % _IN_A_GO:
            time.sleep(0)


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """What a message says of a tensor."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """Raises WeightsError for what names no dtype of numbers."""
    dtype = _DTYPES.get(meta.dtype)
    if dtype is None:
        raise WeightsError(f"{shown(meta.name)} has the unknown dtype {shown(meta.dtype)}")
    return dtype


def num_bytes(meta: TensorMeta) -> int:
    """Raises WeightsError for a shape that no tensor has."""
    dtype = dtype_of(meta)
    count = held = dtype.itemsize
    for size in meta.shape[: _MOST_DIMENSIONS + 1]:
        count *= size
        held *= max(size, 1)
        if size < 0 or held > _MOST_BYTES:
            break
    else:
        if len(meta.shape) <= _MOST_DIMENSIONS:
            return count
    shape = ", ".join(shown(size) for size in meta.shape[:_MOST_DIMENSIONS])
    raise WeightsError(f"{shown(meta.name)} has the shape ({shape}), which no tensor has")


def sizes_of(tensors: Sequence[TensorMeta], limits: WeightLimits = UNLIMITED) -> list[int]:
    """The bytes of each tensor.

    Raises:
        WeightsError: A name comes twice, a dtype or shape is none, or it is too much in all.
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
    """The tensor's bytes, `[bytes]`, uint8; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_tensor(data: Tensor, meta: TensorMeta) -> Tensor:
    """The tensor that lies in these bytes, `[bytes]`, uint8, which must be aligned; a view."""
    return data.view(dtype_of(meta)).view(meta.shape)


def distinct(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without further names of the same tensor: those of tied parameters."""
    first_names: dict[object, str] = {}
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first_names.setdefault(place if tensor.numel() else name, name)
    return {name: state_dict[name] for name in first_names.values()}


def buckets(tensors: Iterable[TensorMeta], sizes: Iterable[int], most: int) -> list[list[int]]:
    """Tensors, by index, that travel together: of one dtype, and of at most so many bytes.

    A larger tensor is a bucket of its own, and so is each tensor when `most` is 0. Dtypes come in
    the order of their first tensors, and within a dtype the tensors in their own order.
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


def read_file(file: int, start: int, size: int) -> Tensor:
    """A part of an open file, `[bytes]`, uint8; without Python's lock, and on this thread alone.

    Raises:
        WeightsError: The file ends before, or there is no memory for it.
        OSError: It can't be read.
    """
    try:
        data = torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        raise WeightsError(f"there is no memory for {size} bytes of new weights") from None
    rest = memoryview(data.numpy().data)
    while rest:
        count = os.preadv(file, [rest], start + size - len(rest))
        if not count:
            raise WeightsError("the weights were cut off while they were read")
        rest = rest[count:]
    return data
