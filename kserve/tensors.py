"""Tensors by name, and what is asked and answered with them: what both codecs read and write."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import msgspec
import numpy as np

from ..config import RequestError, shown

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
"""What the elements of a tensor are, as the protocol names it."""

DATATYPES: tuple[Datatype, ...] = get_args(Datatype)

Array = np.ndarray[Any, np.dtype[Any]]

Parameters = Mapping[str, bool | int | float | str]
"""What a request, a tensor or an answer says besides its tensors."""

DTYPES: dict[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(np.object_),
}
"""The array's dtype for each datatype; an element of BYTES is a Python `bytes`."""

_DATATYPES: dict[np.dtype[Any], Datatype] = {dtype: name for name, dtype in DTYPES.items()}

MAX_DIMENSIONS = 32
MAX_NAME_LENGTH = 256


class TensorError(RequestError):
    """A tensor is none, or not the one that was meant."""

    code = "invalid_tensor"


class NamedTensor(NamedTuple):
    """A tensor and its name.

    Attributes:
        name: As the model calls it.
        data: Its elements, of a dtype of `DTYPES`. Who gets one must not change it: the memory may
            be somebody else's.
    """

    name: str
    data: Array

    @property
    def datatype(self) -> Datatype:
        """Raises TensorError when the protocol has none for the array's dtype."""
        return datatype_of(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def text_tensor(name: str, *texts: str | bytes) -> NamedTensor:
    """A tensor of texts: BYTES `[number of texts]`, in UTF-8."""
    data = np.empty(len(texts), np.object_)
    data[:] = [text.encode() if isinstance(text, str) else text for text in texts]
    return NamedTensor(name, data)


class SharedMemory(NamedTuple):
    """A piece of a registered region: where a tensor is, or is to be put.

    Attributes:
        region: The name under which it was registered.
        byte_size: How many bytes.
        offset: From the region's beginning.
    """

    region: str
    byte_size: int
    offset: int = 0


class RequestedOutput(NamedTuple):
    """An output that a client wants.

    Attributes:
        name: Of the output.
        memory: Where to put it; None to have it in the answer.
        binary: Over HTTP: whether it is wanted behind the JSON, as bytes.
    """

    name: str
    memory: SharedMemory | None = None
    binary: bool = False


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of a model, however it came.

    Attributes:
        model_name: Which model.
        model_version: Which version; "" for any.
        id: What the client calls the request; the answer repeats it.
        parameters: What it says besides, such as `timeout_ns`.
        inputs: Its tensors, in the order given.
        outputs: Those that it wants; empty for all.
        binary_outputs: Over HTTP: whether outputs that are not named are wanted as bytes.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: Parameters = msgspec.field(default_factory=dict)
    inputs: tuple[NamedTensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_outputs: bool = False

    def input(self, name: str) -> Array | None:
        """The input of that name; None when it was not given."""
        return next((each.data for each in self.inputs if each.name == name), None)


class InferResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answers.

    Attributes:
        model_name: Which model.
        model_version: Its version.
        id: The request's.
        outputs: The tensors.
        parameters: What it says besides, such as `triton_final_response`.
    """

    model_name: str
    model_version: str = "1"
    id: str = ""
    outputs: tuple[NamedTensor, ...] = ()
    parameters: Parameters = msgspec.field(default_factory=dict)

    def output(self, name: str) -> Array:
        """The output of that name. Raises KeyError when the answer has none."""
        for each in self.outputs:
            if each.name == name:
                return each.data
        raise KeyError(name)


class TensorSpec(NamedTuple):
    """What a model takes or gives.

    Attributes:
        name: Of the tensor.
        datatype: Of its elements.
        shape: A dimension of -1 may be any.
        optional: Of an input: whether it may be left out.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a client has to know of a model to call it.

    Attributes:
        name: As it is called.
        inputs: What it takes.
        outputs: What it gives.
        versions: Those that there are.
        platform: What runs it.
        decoupled: Whether it may answer one request several times (`ModelStreamInfer`).
        allowed_as: The model of which a caller's key must be for this one; "" for itself.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    versions: tuple[str, ...] = ("1",)
    platform: str = "nano_inference"
    decoupled: bool = False
    allowed_as: str = ""


def datatype_of(data: Array) -> Datatype:
    """The datatype of an array.

    Raises:
        TensorError: The protocol has none for its dtype.
    """
    found = _DATATYPES.get(data.dtype.newbyteorder("<"))
    if found is None:
        raise TensorError(
            f"an array of {data.dtype} has no datatype here; convert it to one of "
            f"{', '.join(DATATYPES)}"
        )
    return found


def checked_datatype(name: str, given: object) -> Datatype:
    """A datatype that came from outside.

    Raises:
        TensorError: It is none.
    """
    if given not in DTYPES:
        raise TensorError(
            f"the datatype of {shown(name)} is {shown(given)}; it must be one of "
            f"{', '.join(DATATYPES)}"
        )
    return given


def element_count(name: str, shape: Sequence[int], max_elements: int) -> int:
    """How many elements a tensor of a shape that came from outside has; nothing is made of it.

    Raises:
        TensorError: A dimension is negative, there are too many of them, or too many elements.
    """
    if len(shape) > MAX_DIMENSIONS or any(each < 0 for each in shape):
        raise TensorError(
            f"the shape of {shown(name)} is {shown(list(shape[: MAX_DIMENSIONS + 1]))}; it must "
            f"have at most {MAX_DIMENSIONS} dimensions, none of them negative"
        )
    # One that holds nothing must not be huge in its other dimensions: numpy can't shape it.
    if math.prod(each for each in shape if each) > max_elements:
        raise TensorError(
            f"a tensor {shown(name)} of shape {shown(list(shape))} has more than {max_elements} "
            "elements, which is more than is taken here; send less at a time"
        )
    return math.prod(shape)
