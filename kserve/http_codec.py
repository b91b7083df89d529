"""Codec of inference requests and responses as HTTP bodies: JSON, then the tensors' binary data.

With binary data the header `HEADER` gives the length of the JSON. A decoded array is read-only; one
of binary data is a view of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..config import RequestError, shown, told_of
from .json_data import json_elements, json_parameters, json_to_array, read_json
from .parameters import MEMORY_PARAMS, byte_count, check_tensor_parameters, memory_of
from .tensor_codec import (
    Json,
    TensorMemory,
    check_tensor_count,
    decode_tensor,
    describe_output,
    describe_response,
    requested_output,
)
from .tensors import (
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    NamedTensor,
    RequestedOutput,
    TensorError,
    array_of,
    checked_name,
    raw_bytes,
)

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
    head = describe_response(response) | {"outputs": outputs}
    if response.parameters:
        head["parameters"] = json_parameters(response.parameters)
    text = msgspec.json.encode(head)
    return [text, *binary], len(text) if binary else None


def _read(head: memoryview) -> _Request:
    try:
        read = read_json(head)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="malformed") from None
    try:
        return msgspec.convert(read, _Request)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body: {told_of(error)}") from None


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
        found.append(decode_tensor(each, place, memory, _inline(each, raw)))
    if binary:
        raise TensorError(
            f"{len(binary)} bytes of binary data are left that belong to no tensor; give the size "
            f"of each by {BINARY_DATA_SIZE_PARAM}"
        )
    return tuple(found)


def _inline(described: _Input, raw: memoryview | None) -> Any:
    """The function that reads an inline tensor's elements."""

    def read(datatype: Datatype) -> Array:
        if raw is not None:
            return array_of(described.name, datatype, described.shape, raw)
        return json_to_array(described.name, datatype, described.shape, described.data)

    return read


def _flag(parameters: Values, name: str, *, default: bool) -> bool:
    given = parameters.get(name, default)
    if not isinstance(given, bool):
        raise RequestError(f"{name} is {shown(given)}; it must be true or false")
    return given
