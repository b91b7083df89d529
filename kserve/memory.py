"""Tensors in shared memory: how a request says where they are, and how they get there and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..config import shown
from .elements import array_of, check_size, raw_bytes
from .tensors import MAX_NAME_LENGTH, Array, Datatype, NamedTensor, SharedMemory, TensorError

REGION_PARAM = "shared_memory_region"
BYTE_SIZE_PARAM = "shared_memory_byte_size"
OFFSET_PARAM = "shared_memory_offset"

MEMORY_PARAMS = frozenset({REGION_PARAM, BYTE_SIZE_PARAM, OFFSET_PARAM})

_MAX_SIZE = 2**63 - 1


class TensorMemory(Protocol):
    """Regions of shared memory by the names under which they are registered."""

    def read(self, place: SharedMemory) -> Array:
        """What is there, as uint8 [byte_size]. Raises RequestError."""

    def write(self, place: SharedMemory, data: bytes | memoryview) -> None:
        """Puts bytes there, of which there are `byte_size`. Raises RequestError."""


def memory_of(name: str, parameters: Mapping[str, object]) -> SharedMemory | None:
    """Where the parameters of a tensor say that it is, or is to be put; None when it comes inline.

    Raises:
        TensorError: They make no sense.
    """
    region = parameters.get(REGION_PARAM)
    size, offset = parameters.get(BYTE_SIZE_PARAM), parameters.get(OFFSET_PARAM, 0)
    if region is None:
        if size is None and OFFSET_PARAM not in parameters:
            return None
        raise TensorError(f"{shown(name)} is in shared memory; add {REGION_PARAM}")
    if not isinstance(region, str) or not 0 < len(region) <= MAX_NAME_LENGTH:
        raise TensorError(
            f"the {REGION_PARAM} of {shown(name)} is {shown(region)}; it must be the name of a "
            f"region, of at most {MAX_NAME_LENGTH} characters"
        )
    return SharedMemory(
        region, _size(name, BYTE_SIZE_PARAM, size), _size(name, OFFSET_PARAM, offset)
    )


def memory_params(place: SharedMemory) -> dict[str, str | int]:
    """The parameters that say so; an offset of 0 is left out."""
    found: dict[str, str | int] = {REGION_PARAM: place.region, BYTE_SIZE_PARAM: place.byte_size}
    if place.offset:
        found[OFFSET_PARAM] = place.offset
    return found


def read_tensor(
    name: str,
    datatype: Datatype,
    shape: Sequence[int],
    place: SharedMemory,
    memory: TensorMemory | None,
) -> Array:
    """A tensor that is in shared memory.

    Raises:
        RequestError: It does not fit its bytes, of which none is read then; or the region can't be
            read.
    """
    check_size(name, datatype, shape, place.byte_size)
    return array_of(name, datatype, shape, _present(name, memory).read(place).data)


def write_tensor(
    tensor: NamedTensor, place: SharedMemory, memory: TensorMemory | None
) -> SharedMemory:
    """Puts a tensor into shared memory, and tells how much of the place given it fills.

    Raises:
        RequestError: It is larger than its place, or the region can't be written.
    """
    data = raw_bytes(tensor)
    if len(data) > place.byte_size:
        raise TensorError(
            f"the output {shown(tensor.name)} has {len(data)} bytes, and its place in shared "
            f"memory {place.byte_size}; name a larger one, or have it in the answer"
        )
    filled = place._replace(byte_size=len(data))
    _present(tensor.name, memory).write(filled, data)
    return filled


def _present(name: str, memory: TensorMemory | None) -> TensorMemory:
    if memory is None:
        raise TensorError(f"{shown(name)} is in shared memory, and there is none here")
    return memory


def _size(name: str, parameter: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= _MAX_SIZE:
        raise TensorError(
            f"the {parameter} of {shown(name)} is {shown(given)}; it must be a number of bytes, 0 "
            "or more"
        )
    return given
