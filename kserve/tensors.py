"""Named tensors, the requests and responses made of them, and their elements as bytes.

Bytes are little endian, row by row; an element of BYTES is its length in four bytes, then itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import msgspec
import numpy as np

from ..config import RequestError, shown

_Unsigned = Literal["UINT8", "UINT16", "UINT32", "UINT64"]
_Signed = Literal["INT8", "INT16", "INT32", "INT64"]
_Float = Literal["FP16", "BF16", "FP32", "FP64"]

Datatype = Literal["BOOL", _Unsigned, _Signed, _Float, "BYTES"]
"""The type of a tensor's elements, by the protocol's name."""

DATATYPES: tuple[Datatype, ...] = get_args(Datatype)

Array = np.ndarray[Any, np.dtype[Any]]

Parameters = Mapping[str, bool | int | float | str]
"""Named values of a request, a tensor or a response."""

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
"""The numpy dtype of each datatype; an element of BYTES is a Python `bytes`."""

_DATATYPES: dict[np.dtype[Any], Datatype] = {dtype: name for name, dtype in DTYPES.items()}

MAX_DIMENSIONS = 32
MAX_NAME_LENGTH = 256

MAX_ELEMENTS = 1 << 40
"""The most elements of one tensor; numpy can address as many of any datatype."""

MAX_STRINGS = 1 << 20
"""The most elements of a BYTES tensor. Each becomes a Python object, which takes ten times the
memory of a short element's bytes."""

_LENGTH_BYTES = 4


class TensorError(RequestError):
    """A tensor is malformed, or isn't the one that the model takes."""

    code = "invalid_tensor"


class NamedTensor(NamedTuple):
    """A tensor and its name.

    Attributes:
        name: The model's name of the tensor.
        data: Elements of a dtype in `DTYPES`. Read only: the memory may belong to another owner.
    """

    name: str
    data: Array

    @property
    def datatype(self) -> Datatype:
        """The protocol's datatype. Raises TensorError if it has none for the array's dtype."""
        found = _DATATYPES.get(self.data.dtype.newbyteorder("<"))
        if found is None:
            raise TensorError(
                f"an array of {self.data.dtype} has no datatype here; convert it to one of "
                f"{', '.join(DATATYPES)}"
            )
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def text_tensor(name: str, *texts: str | bytes) -> NamedTensor:
    """Return a BYTES tensor `[len(texts)]` of texts in UTF-8."""
    data = np.empty(len(texts), np.object_)
    data[:] = [text.encode() if isinstance(text, str) else text for text in texts]
    return NamedTensor(name, data)


class SharedMemory(NamedTuple):
    """A tensor's place in a registered shared-memory region.

    Attributes:
        region: The name that the region was registered under.
        byte_size: Size in bytes.
        offset: Bytes from the region's beginning.
    """

    region: str
    byte_size: int
    offset: int = 0


class RequestedOutput(NamedTuple):
    """An output that a client requests.

    Attributes:
        name: Of the output.
        memory: Where the server writes it; None for within the response.
        binary: Over HTTP: as bytes after the JSON.
    """

    name: str
    memory: SharedMemory | None = None
    binary: bool = False


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a model, from any transport.

    Attributes:
        model_name: The model.
        model_version: Its version; "" for any.
        id: The client's id of the request; the response repeats it.
        parameters: Such as `timeout_ns`.
        inputs: Tensors, in the order given.
        outputs: Requested outputs; empty for all.
        binary_outputs: Over HTTP: outputs that are not named come as bytes.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: Parameters = msgspec.field(default_factory=dict)
    inputs: tuple[NamedTensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_outputs: bool = False

    def input(self, name: str) -> Array | None:
        """Return an input's array; None if it was not given."""
        return next((each.data for each in self.inputs if each.name == name), None)


class InferResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A model's response.

    Attributes:
        model_name: The model.
        model_version: Its version.
        id: The request's.
        outputs: Tensors.
        parameters: Such as `triton_final_response`.
    """

    model_name: str
    model_version: str = "1"
    id: str = ""
    outputs: tuple[NamedTensor, ...] = ()
    parameters: Parameters = msgspec.field(default_factory=dict)

    def output(self, name: str) -> Array:
        """Return an output's array. Raises KeyError if the response has no such output."""
        return {each.name: each.data for each in self.outputs}[name]


class TensorSpec(NamedTuple):
    """An input or output of a model.

    Attributes:
        name: Of the tensor.
        datatype: Of its elements.
        shape: -1 is any size.
        optional: The input may be left out.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model's interface.

    Attributes:
        name: Of the model.
        inputs: Its inputs.
        outputs: Its outputs.
        versions: Available versions.
        platform: The server software.
        decoupled: It may send several responses to one request (`ModelStreamInfer`).
        allowed_as: The model that a caller's key must allow; "" for this one.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    versions: tuple[str, ...] = ("1",)
    platform: str = "nano_inference"
    decoupled: bool = False
    allowed_as: str = ""


class ModelState(NamedTuple):
    """Readiness of a model's version; `reason` says why it isn't ready."""

    name: str
    version: str
    ready: bool
    reason: str


# --- checks of received tensors -------------------------------------------------------------------


def checked_name(name: str) -> str:
    """Return a received tensor's name. Raises TensorError if it is empty or too long."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise TensorError(
            f"a tensor is named {shown(name)}; a name has 1 to {MAX_NAME_LENGTH} characters"
        )
    return name


def checked_datatype(name: str, given: object) -> Datatype:
    """Return a received datatype. Raises TensorError if it is unknown."""
    if given not in DTYPES:
        raise TensorError(
            f"the datatype of {shown(name)} is {shown(given)}; it must be one of "
            f"{', '.join(DATATYPES)}"
        )
    return given


def element_count(name: str, datatype: Datatype, shape: Sequence[int]) -> int:
    """Return the number of elements of a received shape, before anything is allocated for it.

    Raises:
        TensorError: A dimension is negative, there are too many dimensions, or too many elements.
    """
    if len(shape) > MAX_DIMENSIONS or any(each < 0 for each in shape):
        raise TensorError(
            f"the shape of {shown(name)} is {shown(list(shape[: MAX_DIMENSIONS + 1]))}; it must "
            f"have at most {MAX_DIMENSIONS} dimensions, none of them negative"
        )
    most = MAX_STRINGS if datatype == "BYTES" else MAX_ELEMENTS
    # Numpy can't represent huge dimensions beside a zero, so zeros don't count here.
    if math.prod(each for each in shape if each) > most:
        raise TensorError(
            f"a tensor {shown(name)} of {datatype} {shown(list(shape))} has more than {most} "
            "elements, the limit; send less at a time"
        )
    return math.prod(shape)


def check_size(name: str, datatype: Datatype, shape: Sequence[int], size: int) -> int:
    """Check a received size in bytes against the shape, before any byte is read.

    Returns:
        The number of elements.

    Raises:
        TensorError: Size and shape don't fit.
    """
    count = element_count(name, datatype, shape)
    needed = count * (_LENGTH_BYTES if datatype == "BYTES" else DTYPES[datatype].itemsize)
    if size < needed or (size > needed and datatype != "BYTES"):
        least = "at least " if datatype == "BYTES" else ""
        raise TensorError(
            f"{shown(name)} of {datatype} {shown(list(shape))} has {size} bytes; it needs "
            f"{least}{needed}"
        )
    return count


# --- elements as bytes ----------------------------------------------------------------------------


def raw_bytes(tensor: NamedTensor) -> bytes | memoryview:
    """Return a tensor's elements as bytes; a view of the array where possible.

    Raises:
        TensorError: The dtype has no datatype, or an element of BYTES is neither `bytes` nor `str`
            (which is encoded as UTF-8).
    """
    datatype = tensor.datatype
    if datatype == "BYTES":
        return b"".join(
            part
            for each in _encoded(tensor)
            for part in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)
        )
    data = np.ascontiguousarray(tensor.data, dtype=DTYPES[datatype])
    return data.reshape(-1).view(np.uint8).data


def byte_size(tensor: NamedTensor) -> int:
    """Return the length of `raw_bytes`, without a copy. Raises TensorError."""
    if tensor.datatype == "BYTES":
        return sum(_LENGTH_BYTES + len(each) for each in _encoded(tensor))
    return tensor.data.nbytes


def array_of(name: str, datatype: Datatype, shape: Sequence[int], raw: bytes | memoryview) -> Array:
    """Return received bytes as a read-only array.

    The array is a view, which need not be aligned for its dtype; of BYTES it is a copy.

    Raises:
        TensorError: Bytes and shape don't fit.
    """
    count = check_size(name, datatype, shape, len(raw))
    if datatype == "BYTES":
        return _strings(name, count, raw).reshape(shape)
    if datatype == "BOOL" and count and np.frombuffer(raw, np.uint8).max() > 1:
        raise TensorError(f"{shown(name)} is BOOL, but a byte of it is neither 0 nor 1")
    return read_only(np.frombuffer(raw, DTYPES[datatype]).reshape(shape))


def read_only(data: Array) -> Array:
    """Return the same array, not writeable."""
    data.flags.writeable = False
    return data


def _strings(name: str, count: int, raw: bytes | memoryview) -> Array:
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


def _encoded(tensor: NamedTensor) -> list[bytes]:
    """Return the elements of a BYTES tensor, text in UTF-8."""
    elements = tensor.data.reshape(-1).tolist()
    try:
        encoded = [each.encode() if isinstance(each, str) else each for each in elements]
    except UnicodeEncodeError:
        raise TensorError(f"{shown(tensor.name)} has a text that is not valid Unicode") from None
    for each in encoded:
        if not isinstance(each, bytes):
            raise TensorError(
                f"{shown(tensor.name)} is BYTES, but an element of it is {shown(each)}; each must "
                "be `bytes`, or text"
            )
    return encoded
