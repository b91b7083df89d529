"""Requests and answers to and from the bodies of HTTP: JSON, and behind it, where there is any,
binary data of the tensors that say so, in their order.

The header `HEADER` has the length of the JSON then. Nothing here waits, or reads a clock. An array
that was decoded is read-only; one of binary data is a view of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ..config import RequestError, shown, told_of
from .checks import check_not_classified, check_parameters, checked_name, counted
from .elements import array_of, raw_bytes
from .json_data import json_elements, json_parameters, json_to_array, read_json
from .memory import (
    MEMORY_PARAMS,
    TensorMemory,
    memory_of,
    memory_params,
    read_tensor,
    write_tensor,
)
from .tensors import (
    Array,
    InferRequest,
    InferResponse,
    NamedTensor,
    Parameters,
    RequestedOutput,
    TensorError,
    checked_datatype,
)

HEADER = "Inference-Header-Content-Length"
"""The header of a request and of an answer that has binary data: how many bytes the JSON has."""

BINARY_DATA_PARAM = "binary_data"
BINARY_DATA_SIZE_PARAM = "binary_data_size"
BINARY_DATA_OUTPUT_PARAM = "binary_data_output"

_INPUT_PARAMS = MEMORY_PARAMS | {BINARY_DATA_SIZE_PARAM}
_OUTPUT_PARAMS = MEMORY_PARAMS | {BINARY_DATA_PARAM}

Parts = list[bytes | memoryview]
"""A body in pieces, in their order."""

Values = dict[str, bool | int | float | str]

T = TypeVar("T")


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: Values | None = None
    data: Any = msgspec.UNSET


class _Input(_Tensor, forbid_unknown_fields=True):
    pass


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


class _Response(msgspec.Struct):
    model_name: str
    model_version: str | None = None
    id: str | None = None
    parameters: Values | None = None
    outputs: list[_Tensor] = []


def decode_http_request(
    model_name: str,
    model_version: str,
    body: bytes | memoryview,
    header_length: int | None = None,
    memory: TensorMemory | None = None,
) -> InferRequest:
    """What the body of an `infer` asks.

    Args:
        model_name: Which model, as the path says.
        model_version: Which version; "" for any.
        body: The whole body.
        header_length: What the header `HEADER` says; None where there is none.
        memory: What reads its inputs in shared memory; None where there is none.

    Raises:
        RequestError: It is not well-formed, or a region can't be read.
    """
    head, binary = _split(body, header_length)
    found = _convert(head, _Request)
    if found.model_name not in {None, model_name}:
        raise RequestError(
            f"the body is for the model {shown(found.model_name)}, and the path for "
            f"{shown(model_name)}; leave out model_name"
        )
    for each in found.inputs:
        check_parameters(each.name, each.parameters or {}, _INPUT_PARAMS)
    parameters = dict(found.parameters or {})
    binary_outputs = _flag(
        BINARY_DATA_OUTPUT_PARAM, parameters.pop(BINARY_DATA_OUTPUT_PARAM, False)
    )
    return InferRequest(
        model_name=model_name,
        model_version=model_version,
        id=found.id or "",
        parameters=parameters,
        inputs=_tensors(found.inputs, binary, memory),
        outputs=tuple(
            _requested_output(each, binary_outputs) for each in counted(found.outputs or [])
        ),
        binary_outputs=binary_outputs,
    )


def encode_http_response(
    response: InferResponse,
    requested: Iterable[RequestedOutput] = (),
    binary_outputs: bool = False,
    memory: TensorMemory | None = None,
) -> tuple[Parts, int | None]:
    """The body of an answer, whose outputs are put where each was wanted.

    Args:
        response: The answer.
        requested: What the client has asked of outputs.
        binary_outputs: Whether outputs of which it has asked nothing are binary data.
        memory: What writes those that it wants in shared memory.

    Returns:
        The body, and the value of its header `HEADER`, or None where it has none.

    Raises:
        RequestError: An output is larger than its place, has no form in JSON where that is wanted,
            or a region can't be written.
    """
    wanted = {each.name: each for each in requested}
    described: list[dict[str, Any]] = []
    binary: Parts = []
    for tensor in response.outputs:
        output = wanted.get(tensor.name, RequestedOutput(tensor.name, binary=binary_outputs))
        if output.memory is not None:
            filled = write_tensor(tensor, output.memory, memory)
            described.append(_described(tensor, parameters=memory_params(filled)))
        else:
            described.append(_inline(tensor, output.binary, binary))
    head: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = json_parameters(response.parameters)
    return _joined({**head, "outputs": described}, binary)


def encode_http_request(
    inputs: Sequence[NamedTensor],
    *,
    requested_outputs: Iterable[RequestedOutput | str] = (),
    id: str = "",
    parameters: Parameters | None = None,
    binary: bool = True,
) -> tuple[Parts, int | None]:
    """The body of an `infer`, which a client sends.

    Args:
        inputs: Its inputs.
        requested_outputs: The outputs wanted, by name or with how each is wanted; none for all.
        id: What the answer repeats.
        parameters: What is said besides.
        binary: Whether inputs, and outputs that are not asked for otherwise, are binary data.

    Returns:
        The body, and the value of its header `HEADER`, or None where it has none.

    Raises:
        TensorError: The protocol, or without `binary` JSON, can't carry it.
    """
    parts: Parts = []
    head: dict[str, Any] = {"inputs": [_inline(each, binary, parts) for each in inputs]}
    if id:
        head["id"] = id
    if given := {**(parameters or {}), **({BINARY_DATA_OUTPUT_PARAM: True} if binary else {})}:
        head["parameters"] = json_parameters(given)
    if outputs := [_wanted(each, binary) for each in requested_outputs]:
        head["outputs"] = outputs
    return _joined(head, parts)


def decode_http_response(
    body: bytes | memoryview,
    header_length: int | None = None,
    memory: TensorMemory | None = None,
) -> InferResponse:
    """What the body of an answer says.

    Args:
        body: The whole body.
        header_length: What the header `HEADER` says; None where there is none.
        memory: What reads the outputs that were put into shared memory.

    Raises:
        RequestError: It is not well-formed, or has an output in shared memory that can't be read.
    """
    head, binary = _split(body, header_length)
    found = _convert(head, _Response)
    return InferResponse(
        model_name=found.model_name,
        model_version=found.model_version or "",
        id=found.id or "",
        outputs=_tensors(found.outputs, binary, memory),
        parameters=found.parameters or {},
    )


def _split(body: bytes | memoryview, header_length: int | None) -> tuple[memoryview, memoryview]:
    view = memoryview(body)
    if header_length is None:
        return view, view[:0]
    if not 0 < header_length <= len(view):
        raise RequestError(
            f"{HEADER} is {shown(header_length)}, and the body has {len(view)} bytes; it must be "
            "the length of the JSON at the beginning, and there must be some"
        )
    return view[:header_length], view[header_length:]


def _convert(head: memoryview, kind: type[T]) -> T:
    try:
        read = read_json(head)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="malformed") from None
    try:
        return msgspec.convert(read, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body: {told_of(error)}") from None


def _tensors(
    described: Sequence[_Tensor], binary: memoryview, memory: TensorMemory | None
) -> tuple[NamedTensor, ...]:
    found = []
    for each in counted(described):
        name = checked_name(each.name)
        size = _binary_size(name, each.parameters or {})
        if size is not None and size > len(binary):
            raise TensorError(
                f"{shown(name)} has {size} bytes of binary data; {len(binary)} are left. "
                f"{HEADER} must have the length of the JSON alone"
            )
        found.append(NamedTensor(name, _data(each, size, binary, memory)))
        binary = binary[size or 0 :]
    if binary:
        raise TensorError(
            f"{len(binary)} bytes of binary data are left that belong to no tensor; say how many "
            f"each has by {BINARY_DATA_SIZE_PARAM}"
        )
    return tuple(found)


def _data(
    tensor: _Tensor, size: int | None, binary: memoryview, memory: TensorMemory | None
) -> Array:
    name, shape = tensor.name, tensor.shape
    datatype = checked_datatype(name, tensor.datatype)
    place = memory_of(name, tensor.parameters or {})
    ways = (place is not None) + (size is not None) + (tensor.data is not msgspec.UNSET)
    if ways != 1:
        raise TensorError(
            f"{shown(name)} must have its elements in one way: in shared memory, as binary data "
            f"({BINARY_DATA_SIZE_PARAM}), or in `data`; it has {ways}"
        )
    if place is not None:
        return read_tensor(name, datatype, shape, place, memory)
    if size is not None:
        return array_of(name, datatype, shape, binary[:size])
    return json_to_array(name, datatype, shape, tensor.data)


def _binary_size(name: str, parameters: Mapping[str, object]) -> int | None:
    size = parameters.get(BINARY_DATA_SIZE_PARAM)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise TensorError(
            f"the {BINARY_DATA_SIZE_PARAM} of {shown(name)} is {shown(size)}; it must be a number "
            "of bytes, 0 or more"
        )
    return size


def _requested_output(output: _Output, binary_outputs: bool) -> RequestedOutput:
    name, parameters = checked_name(output.name), output.parameters or {}
    check_not_classified(name, parameters)
    check_parameters(name, parameters, _OUTPUT_PARAMS)
    binary = _flag(BINARY_DATA_PARAM, parameters.get(BINARY_DATA_PARAM, binary_outputs))
    return RequestedOutput(name, memory_of(name, parameters), binary)


def _flag(parameter: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise RequestError(f"{parameter} is {shown(given)}; it must be true or false")
    return given


def _inline(tensor: NamedTensor, as_binary: bool, binary: Parts) -> dict[str, Any]:
    """A tensor in JSON; its binary data, where it is to have some, is added to what there is."""
    if not as_binary:
        return _described(tensor, data=json_elements(tensor))
    binary.append(raw_bytes(tensor))
    return _described(tensor, parameters={BINARY_DATA_SIZE_PARAM: len(binary[-1])})


def _described(tensor: NamedTensor, **more: object) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), **more}


def _wanted(output: RequestedOutput | str, binary: bool) -> dict[str, Any]:
    wanted = RequestedOutput(output, binary=binary) if isinstance(output, str) else output
    if wanted.memory is not None:
        return {"name": wanted.name, "parameters": memory_params(wanted.memory)}
    return {"name": wanted.name, "parameters": {BINARY_DATA_PARAM: wanted.binary}}


def _joined(head: dict[str, Any], binary: Parts) -> tuple[Parts, int | None]:
    text = msgspec.json.encode(head)
    return [text, *binary], len(text) if binary else None
