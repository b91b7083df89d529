"""Codec of tensors, requests and responses as JSON and HTTP bodies, shared in parts by gRPC's.

An HTTP body is JSON, then the tensors' binary data; with such data the header `HEADER` gives the
length of the JSON. A decoded array is read-only; one of binary data is a view of the body.

FP16 and BF16 have no JSON form. Numbers that aren't finite are written `NaN`, `Infinity` and
`-Infinity`, as Triton does and its clients read, though JSON has none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np

from ..config import RequestError, shown
from ..config.wrong_values import told_of
from .parameters import MEMORY_PARAMS, byte_count, check_tensor_parameters, memory_of, memory_params
from .tensors import (
    DTYPES,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    RequestedOutput,
    SharedMemory,
    TensorError,
    TensorSpec,
    array_of,
    check_size,
    checked_datatype,
    checked_name,
    element_count,
    raw_bytes,
    read_only,
)

MAX_TENSORS = 1024
"""The most inputs, and the most outputs, of a request or a response."""

Json = dict[str, Any]

T = TypeVar("T")


class TensorMemory(Protocol):
    """Shared-memory regions by their registered names."""

    def read(self, place: SharedMemory) -> Array:
        """Return a place's bytes, uint8 `[byte_size]`. Raises RequestError."""

    def write(self, place: SharedMemory, data: bytes | memoryview) -> None:
        """Write bytes at a place. Raises RequestError."""


def check_tensor_count(tensors: Sequence[T]) -> Sequence[T]:
    """Return the tensors. Raises TensorError if there are more than `MAX_TENSORS`."""
    if len(tensors) > MAX_TENSORS:
        raise TensorError(f"there are {len(tensors)} tensors; at most {MAX_TENSORS} are accepted")
    return tensors


def decode_tensor(
    described: Any,
    place: SharedMemory | None,
    memory: TensorMemory | None,
    raw: bytes | memoryview | None,
    typed: Callable[[Any, Datatype], Array],
) -> NamedTensor:
    """Return a received tensor, from shared memory, raw bytes or typed elements.

    Args:
        described: Has `name`, `datatype` and `shape`.
        place: Its place in shared memory; None if it is inline.
        memory: Reads it there; None if there is no shared memory.
        raw: Its bytes; None if it has none.
        typed: Returns its elements in the codec's own form.

    Raises:
        RequestError: The tensor is malformed, or its region can't be read.
    """
    name, shape = described.name, tuple(described.shape)
    datatype = checked_datatype(name, described.datatype)
    if place is not None:
        check_size(name, datatype, shape, place.byte_size)
        raw = _present(name, memory).read(place).data
    if raw is not None:
        return NamedTensor(name, array_of(name, datatype, shape, raw))
    return NamedTensor(name, typed(described, datatype))


def requested_output(
    name: str, parameters: Mapping[str, object], known: Collection[str] = MEMORY_PARAMS
) -> RequestedOutput:
    """Return a received output request.

    Raises:
        RequestError: It is malformed, or has an unknown parameter.
    """
    check_tensor_parameters(checked_name(name), parameters, known)
    return RequestedOutput(name, memory_of(name, parameters))


def describe_output(
    tensor: NamedTensor, place: SharedMemory | None, memory: TensorMemory | None
) -> tuple[Json, Mapping[str, str | int] | None]:
    """Return an output's description, and the parameters of its place; None if it is inline.

    An output with a place is written there. The parameters give the bytes that it fills.

    Raises:
        RequestError: The output is larger than its place, or its region can't be written.
    """
    if place is None:
        return describe_tensor(tensor), None
    data = raw_bytes(tensor)
    if len(data) > place.byte_size:
        raise TensorError(
            f"the output {shown(tensor.name)} has {len(data)} bytes, and its place in shared "
            f"memory {place.byte_size}; name a larger one, or request it within the response"
        )
    filled = place._replace(byte_size=len(data))
    _present(tensor.name, memory).write(filled, data)
    return describe_tensor(tensor), memory_params(filled)


def describe_tensor(tensor: NamedTensor | TensorSpec) -> Json:
    """Return a tensor's name, datatype and shape."""
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def describe_response(response: InferResponse) -> Json:
    """Return a response without its outputs and parameters; the id is left out if empty."""
    found = {"model_name": response.model_name, "model_version": response.model_version}
    return found | {"id": response.id} if response.id else found


def describe_parameters(response: InferResponse) -> Json:
    """Return the field of a response's parameters; {} without any."""
    return {"parameters": response.parameters} if response.parameters else {}


def model_metadata(spec: ModelSpec) -> Json:
    """Return a model's metadata, which are also the fields of ModelMetadataResponse."""
    return {
        "name": spec.name,
        "versions": list(spec.versions),
        "platform": spec.platform,
        "inputs": [describe_tensor(each) for each in spec.inputs],
        "outputs": [describe_tensor(each) for each in spec.outputs],
    }


def model_config(spec: ModelSpec) -> Json:
    """Return Triton's configuration of a model: also which inputs are optional, and `decoupled`.

    A batch is a dimension of the shape, so there is no batch size.
    """

    def configured(tensor: TensorSpec) -> Json:
        # Triton's configuration alone calls BYTES STRING.
        kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
        return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": tensor.shape}

    return {
        "name": spec.name,
        "platform": spec.platform,
        "backend": spec.platform,
        "max_batch_size": 0,
        "input": [configured(each) | {"optional": each.optional} for each in spec.inputs],
        "output": [configured(each) for each in spec.outputs],
        "model_transaction_policy": {"decoupled": spec.decoupled},
    }


def _present(name: str, memory: TensorMemory | None) -> TensorMemory:
    if memory is None:
        raise TensorError(f"{shown(name)} is in shared memory, and there is none here")
    return memory


# --- elements as JSON -----------------------------------------------------------------------------

_JSON_TYPES: dict[Datatype, set[type]] = {
    "BOOL": {bool, int},
    "FP32": {int, float},
    "FP64": {int, float},
    "BYTES": {str},
}
"""The Python types of decoded elements; of the other datatypes only `int`."""


def json_to_array(name: str, datatype: Datatype, shape: Sequence[int], data: object) -> Array:
    """Return elements that came as JSON as a read-only array.

    Args:
        name: Of the tensor.
        datatype: Of the elements.
        shape: The received shape, unchecked.
        data: Decoded JSON: a flat list, row by row, or lists nested as the shape.

    Raises:
        TensorError: They don't fit.
    """
    _check_has_json(name, datatype)
    count = element_count(name, datatype, shape)
    flat = _flat(data, shape)
    if flat is None or len(flat) != count:
        raise TensorError(
            f"the data of {shown(name)} is not a list of {count} elements, nor lists in lists of "
            f"the shape {shown(list(shape))}"
        )
    allowed = _JSON_TYPES.get(datatype, {int})
    if set(map(type, flat)) - allowed:
        _refuse(name, datatype, next(each for each in flat if type(each) not in allowed))
    if datatype == "BYTES":
        found = np.empty(count, dtype=np.object_)
        try:
            found[:] = [each.encode() for each in flat]
        except UnicodeEncodeError:
            raise TensorError(f"{shown(name)} has a text that is not valid Unicode") from None
    elif DTYPES[datatype].kind == "f":
        found = _floats(name, datatype, flat)
    else:
        found = _integers(name, datatype, flat)
    return read_only(found.reshape(shape))


def array_to_json(tensor: NamedTensor) -> list[Any]:
    """Return a tensor's elements, row by row, as JSON can hold them; BYTES as text.

    Raises:
        TensorError: They have no JSON form; binary data has one.
    """
    _check_has_json(tensor.name, tensor.datatype)
    flat: list[Any] = tensor.data.reshape(-1).tolist()
    if tensor.datatype != "BYTES":
        return flat
    try:
        return [each.decode() if isinstance(each, bytes) else str(each) for each in flat]
    except UnicodeDecodeError:
        raise TensorError(
            f"{shown(tensor.name)} has bytes that are not text in UTF-8, which JSON can't hold; "
            "request it as binary data (`binary_data`)"
        ) from None


def json_elements(tensor: NamedTensor) -> msgspec.Raw:
    """Return `array_to_json`, encoded. Raises TensorError."""
    elements = array_to_json(tensor)
    # msgspec writes null for numbers that aren't finite.
    if tensor.data.dtype.kind == "f" and not np.isfinite(tensor.data).all():
        return msgspec.Raw(json.dumps(elements, separators=(",", ":")).encode())
    return msgspec.Raw(msgspec.json.encode(elements))


def read_json(text: bytes | memoryview) -> Any:
    """Return decoded JSON, in which numbers may be `NaN`, `Infinity` and `-Infinity`.

    Raises:
        ValueError: It is malformed; the text says why.
    """
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            text = bytes(text)
            if b"NaN" not in text and b"Infinity" not in text:
                raise
        return json.loads(text.decode(), parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"the number {shown(text)} is out of range")
    return found


def _flat(data: object, shape: Sequence[int]) -> list[Any] | None:
    """Return all elements, row by row; None if nested lists have another shape."""
    if not isinstance(data, list):
        return None
    if not data or not isinstance(data[0], list):
        return data
    level: list[Any] = [data]
    for size in shape:
        if any(not isinstance(each, list) or len(each) != size for each in level):
            return None
        level = list(chain.from_iterable(level))
    return level


def _integers(name: str, datatype: Datatype, flat: list[Any]) -> Array:
    dtype = DTYPES[datatype]
    low, high = 0, 1
    if datatype != "BOOL":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if flat and (min(flat) < low or max(flat) > high):
        _refuse(name, datatype, next(each for each in flat if not low <= each <= high))
    return np.array(flat, dtype=dtype)


def _floats(name: str, datatype: Datatype, flat: list[Any]) -> Array:
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError:
        _refuse(name, datatype, max(flat, key=abs))
    with np.errstate(over="ignore"):
        found = wide.astype(DTYPES[datatype])
    overflown = np.isinf(found) & np.isfinite(wide)
    if overflown.any():
        _refuse(name, datatype, float(wide[overflown][0]))
    return found


def _refuse(name: str, datatype: Datatype, element: object) -> NoReturn:
    kind = "text" if datatype == "BYTES" else datatype
    raise TensorError(f"an element of {shown(name)} is {shown(element)}, which is not {kind}")


def _check_has_json(name: str, datatype: Datatype) -> None:
    if datatype in ("FP16", "BF16"):
        raise TensorError(
            f"{shown(name)} is {datatype}, which JSON can't hold; use binary data (`binary_data`)"
        )


# --- HTTP bodies ----------------------------------------------------------------------------------

HEADER = "Inference-Header-Content-Length"
"""The header of a body with binary data: the length of its JSON in bytes."""

BINARY_DATA_PARAM = "binary_data"
BINARY_DATA_SIZE_PARAM = "binary_data_size"
BINARY_DATA_OUTPUT_PARAM = "binary_data_output"

_INPUT_PARAMS = MEMORY_PARAMS | {BINARY_DATA_SIZE_PARAM}
_OUTPUT_PARAMS = MEMORY_PARAMS | {BINARY_DATA_PARAM}

Values = dict[str, bool | int | float | str]


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: Values | None = None
    data: Any = msgspec.UNSET


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parameters: Values | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Input]
    # KServe's own client names the model here as well.
    model_name: str | None = None
    id: str | None = None
    parameters: Values | None = None
    outputs: list[_Output] | None = None


def decode_http_request(
    model_name: str,
    model_version: str,
    body: bytes | memoryview,
    header_length: int | None = None,
    memory: TensorMemory | None = None,
) -> InferRequest:
    """Decode the body of an `infer` request.

    Args:
        model_name: The model, from the path.
        model_version: Its version; "" for any.
        body: The whole body.
        header_length: The value of `HEADER`; None if it was not sent.
        memory: Reads inputs in shared memory; None if there is none.

    Raises:
        RequestError: The body is malformed, or a region can't be read.
    """
    view = memoryview(body)
    length = len(view) if header_length is None else header_length
    if header_length is not None and not 0 < length <= len(view):
        raise RequestError(
            f"{HEADER} is {shown(length)}, and the body has {len(view)} bytes; it must be the "
            "length of the JSON at the beginning, and there must be some"
        )
    found = _read(view[:length])
    if found.model_name not in {None, model_name}:
        raise RequestError(
            f"the body is for the model {shown(found.model_name)}, and the path for "
            f"{shown(model_name)}; leave out model_name"
        )
    for each in found.inputs:
        check_tensor_parameters(each.name, each.parameters or {}, _INPUT_PARAMS)
    parameters = found.parameters or {}
    binary_outputs = _flag(parameters, BINARY_DATA_OUTPUT_PARAM, default=False)
    parameters.pop(BINARY_DATA_OUTPUT_PARAM, None)
    return InferRequest(
        model_name=model_name,
        model_version=model_version,
        id=found.id or "",
        parameters=parameters,
        inputs=_tensors(found.inputs, view[length:], memory),
        outputs=tuple(
            requested_output(each.name, each.parameters or {}, _OUTPUT_PARAMS)._replace(
                binary=_flag(each.parameters or {}, BINARY_DATA_PARAM, default=binary_outputs)
            )
            for each in check_tensor_count(found.outputs or [])
        ),
        binary_outputs=binary_outputs,
    )


def encode_http_response(
    response: InferResponse,
    requested: Iterable[RequestedOutput] = (),
    binary_outputs: bool = False,
    memory: TensorMemory | None = None,
) -> tuple[list[bytes | memoryview], int | None]:
    """Encode a response as a body.

    Args:
        response: The response.
        requested: The request's outputs.
        binary_outputs: Outputs that the request doesn't name are binary data.
        memory: Writes outputs that were requested in shared memory.

    Returns:
        The parts of the body in order, and the value of `HEADER`, None without binary data.

    Raises:
        RequestError: An output is larger than its place, was requested as JSON and has no JSON
            form, or a region can't be written.
    """
    by_name = {each.name: each for each in requested}
    outputs: list[Json] = []
    binary: list[bytes | memoryview] = []
    for tensor in response.outputs:
        output = by_name.get(tensor.name, RequestedOutput(tensor.name, binary=binary_outputs))
        described, parameters = describe_output(tensor, output.memory, memory)
        if parameters is None and output.binary:
            binary.append(raw_bytes(tensor))
            parameters = {BINARY_DATA_SIZE_PARAM: len(binary[-1])}
        described |= {"parameters": parameters} if parameters else {"data": json_elements(tensor)}
        outputs.append(described)
    head = describe_response(response) | describe_parameters(response)
    text = msgspec.json.encode(head | {"outputs": outputs})
    return [text, *binary], len(text) if binary else None


def _read(head: memoryview) -> _Request:
    try:
        read = read_json(head)
    except ValueError as error:
        raise RequestError(
            f"the body is not JSON: {error}", code="malformed", remedy="send a JSON object"
        ) from None
    try:
        return msgspec.convert(read, _Request)
    except msgspec.ValidationError as error:
        raise RequestError(told_of(error, "", read)) from None


def _tensors(
    described: Sequence[_Input], binary: memoryview, memory: TensorMemory | None
) -> tuple[NamedTensor, ...]:
    found = []
    for each in check_tensor_count(described):
        name, parameters = checked_name(each.name), each.parameters or {}
        raw = None
        if (given := parameters.get(BINARY_DATA_SIZE_PARAM)) is not None:
            size = byte_count(name, BINARY_DATA_SIZE_PARAM, given)
            if size > len(binary):
                raise TensorError(
                    f"{shown(name)} has {size} bytes of binary data; {len(binary)} are left. "
                    f"{HEADER} must have the length of the JSON alone"
                )
            raw, binary = binary[:size], binary[size:]
        place = memory_of(name, parameters)
        ways = (place is not None) + (raw is not None) + (each.data is not msgspec.UNSET)
        if ways != 1:
            raise TensorError(
                f"{shown(name)} must have its elements in one way: in shared memory, as binary "
                f"data ({BINARY_DATA_SIZE_PARAM}), or in `data`; it has {ways}"
            )
        found.append(decode_tensor(each, place, memory, raw, _typed))
    if binary:
        raise TensorError(
            f"{len(binary)} bytes of binary data are left that belong to no tensor; give the size "
            f"of each by {BINARY_DATA_SIZE_PARAM}"
        )
    return tuple(found)


def _typed(described: _Input, datatype: Datatype) -> Array:
    return json_to_array(described.name, datatype, described.shape, described.data)


def _flag(parameters: Values, name: str, *, default: bool) -> bool:
    given = parameters.get(name, default)
    if not isinstance(given, bool):
        raise RequestError(f"{name} is {shown(given)}; it must be true or false")
    return given
