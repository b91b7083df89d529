"""Tensors of every datatype and shape, as Hypothesis draws them, and memory to put them into."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from nano_inference.config import RequestError
from nano_inference.kserve.tensors import (
    DATATYPES,
    DTYPES,
    Array,
    Datatype,
    NamedTensor,
    Parameters,
    SharedMemory,
)

TYPED = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` by datatype; tensors of other datatypes have no typed form."""

SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
PARAMETERS: st.SearchStrategy[Parameters] = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    max_size=3,
)


class Memory:
    """A region of this process, named "region", in place of shared memory.

    Attributes:
        data: Its bytes.
        reads: Places that were read.
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self.data = np.zeros(size, dtype=np.uint8)
        self.reads: list[SharedMemory] = []

    def read(self, place: SharedMemory) -> Array:
        self.reads.append(place)
        return self._piece(place)

    def write(self, place: SharedMemory, data: bytes | memoryview) -> None:
        self._piece(place)[:] = np.frombuffer(data, dtype=np.uint8)

    def _piece(self, place: SharedMemory) -> Array:
        end = place.offset + place.byte_size
        if place.region != "region" or end > self.data.size:
            raise RequestError("there is no such place in the region", code="unknown_region")
        return self.data[place.offset : end]


@st.composite
def arrays(draw: st.DrawFn, datatype: Datatype, *, text: bool = False) -> Array:
    """An array of a datatype: any bits; of BYTES any bytes, or with `text` those of text."""
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    if datatype == "BYTES":
        one = st.text(max_size=6).map(str.encode) if text else st.binary(max_size=6)
        strings = np.empty(count, dtype=np.object_)
        strings[:] = draw(st.lists(one, min_size=count, max_size=count))
        return strings.reshape(shape)
    size = count * DTYPES[datatype].itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8)
    if datatype == "BOOL":
        raw = raw % 2
    return raw.view(DTYPES[datatype]).reshape(shape)


@st.composite
def tensors(
    draw: st.DrawFn, *, without: Collection[Datatype] = (), text: bool = False
) -> tuple[NamedTensor, ...]:
    """Some tensors, each of a name of its own."""
    datatypes = st.sampled_from([each for each in DATATYPES if each not in without])
    drawn = draw(st.lists(datatypes, max_size=3))
    return tuple(
        NamedTensor(f"tensor {place}", draw(arrays(datatype, text=text)))
        for place, datatype in enumerate(drawn)
    )


def elements(data: Array) -> list[Any] | bytes:
    """What two arrays of the same elements, bit by bit, have in common."""
    return data.reshape(-1).tolist() if data.dtype == np.object_ else data.tobytes()


def assert_same(found: tuple[NamedTensor, ...], given: tuple[NamedTensor, ...]) -> None:
    """The tensors are equal bit by bit, and read-only."""
    assert [(each.name, each.datatype, each.shape) for each in found] == [
        (each.name, each.datatype, each.shape) for each in given
    ]
    for one, other in zip(found, given, strict=True):
        assert elements(one.data) == elements(other.data)
        assert not one.data.flags.writeable


def assert_equal(found: tuple[NamedTensor, ...], given: tuple[NamedTensor, ...]) -> None:
    """They are the same but for the bits that tell one NaN from another."""
    for one, other in zip(found, given, strict=True):
        assert one.name == other.name
        assert one.datatype == other.datatype
        np.testing.assert_array_equal(one.data, other.data, strict=True)
        assert not one.data.flags.writeable
