"""The elements of a tensor as bytes, and back: little endian, row by row.

An element of BYTES is its length in four bytes, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import shown
from .tensors import DTYPES, Array, Datatype, NamedTensor, TensorError, element_count

MAX_ELEMENTS = 1 << 40
"""No tensor has more; numpy can address so many of any datatype."""

MAX_STRINGS = 1 << 20
"""A tensor of BYTES has at most so many elements: each becomes an object of its own, which takes
ten times the memory of a short one's bytes."""

_LENGTH_BYTES = 4


def raw_bytes(tensor: NamedTensor) -> bytes | memoryview:
    """What goes over the wire, or into shared memory; a view where that can be.

    Raises:
        TensorError: The protocol has no datatype for it, or an element of BYTES is neither `bytes`
            nor `str`, which goes as UTF-8.
    """
    datatype = tensor.datatype
    if datatype == "BYTES":
        return b"".join(
            part
            for each in _strings_of(tensor)
            for part in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)
        )
    data = np.ascontiguousarray(tensor.data, dtype=DTYPES[datatype])
    return data.reshape(-1).view(np.uint8).data


def byte_size(tensor: NamedTensor) -> int:
    """How many bytes `raw_bytes` has; nothing is copied for it. Raises as that."""
    if tensor.datatype == "BYTES":
        return sum(_LENGTH_BYTES + len(each) for each in _strings_of(tensor))
    return tensor.data.nbytes


def array_of(name: str, datatype: Datatype, shape: Sequence[int], raw: bytes | memoryview) -> Array:
    """The array of a shape and bytes that came from outside: a read-only view of them.

    Its memory need not be aligned for its datatype. That of BYTES is a copy.

    Raises:
        TensorError: They don't go together.
    """
    count = element_count(name, shape, MAX_ELEMENTS)
    if datatype == "BYTES":
        return _strings(name, count, raw).reshape(shape)
    check_size(name, datatype, shape, len(raw))
    if datatype == "BOOL" and count and np.frombuffer(raw, np.uint8).max() > 1:
        raise TensorError(f"{shown(name)} is BOOL, but a byte of it is neither 0 nor 1")
    return read_only(np.frombuffer(raw, DTYPES[datatype]).reshape(shape))


def check_size(name: str, datatype: Datatype, shape: Sequence[int], size: int) -> None:
    """Whether so many bytes can be a tensor of that shape; known before any of them is read.

    Raises:
        TensorError: They can't.
    """
    count = element_count(name, shape, MAX_ELEMENTS)
    if datatype == "BYTES":
        if count > MAX_STRINGS:
            raise TensorError(
                f"{shown(name)} has {count} elements; of BYTES at most {MAX_STRINGS} are taken"
            )
        needed, fits = f"at least {count * _LENGTH_BYTES}", size >= count * _LENGTH_BYTES
    else:
        bytes_needed = count * DTYPES[datatype].itemsize
        needed, fits = str(bytes_needed), size == bytes_needed
    if not fits:
        raise TensorError(
            f"{shown(name)} of {datatype} {shown(list(shape))} has {size} bytes; it needs {needed}"
        )


def read_only(data: Array) -> Array:
    """The same array, which refuses to be written to."""
    data.flags.writeable = False
    return data


def _strings(name: str, count: int, raw: bytes | memoryview) -> Array:
    check_size(name, "BYTES", (count,), len(raw))
    found = np.empty(count, dtype=np.object_)
    position = 0
    for place in range(count):
        begin = position + _LENGTH_BYTES
        position = begin + int.from_bytes(raw[position:begin], "little")
        if begin > len(raw) or position > len(raw):
            raise TensorError(
                f"{shown(name)} ends within its element {place} of {count}: each is its length in "
                "4 bytes, little endian, and then itself"
            )
        found[place] = bytes(raw[begin:position])
    if position != len(raw):
        raise TensorError(
            f"{shown(name)} has {len(raw) - position} bytes more than its {count} elements"
        )
    return read_only(found)


def _strings_of(tensor: NamedTensor) -> list[bytes]:
    return [_string(tensor.name, each) for each in tensor.data.reshape(-1).tolist()]


def _string(name: str, element: object) -> bytes:
    try:
        if isinstance(element, str):
            return element.encode()
    except UnicodeEncodeError:
        raise TensorError(f"{shown(name)} has a text that is not valid Unicode") from None
    if not isinstance(element, bytes):
        raise TensorError(
            f"{shown(name)} is BYTES, but an element of it is {shown(element)}; each must be "
            "`bytes`, or text"
        )
    return element
