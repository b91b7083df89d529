"""Codec of inference requests and responses as gRPC messages.

A tensor's elements are looked up in shared memory, then in the raw contents, then in the typed
contents. Messages may be those of `protobuf.py`, or another library's with the same fields. A
decoded array is read-only, and a view where possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import RequestError, shown
from . import codec
from .codec import Json, TensorMemory
from .parameters import check_tensor_parameters, memory_of, memory_params
from .protobuf import ModelInferRequest, ModelInferResponse
from .tensors import (
    DTYPES,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    NamedTensor,
    Parameters,
    RequestedOutput,
    SharedMemory,
    TensorError,
    checked_name,
    element_count,
    raw_bytes,
    read_only,
)

_CONTENTS: dict[Datatype, tuple[str, Datatype]] = {
    "BOOL": ("bool_contents", "BOOL"),
    "UINT8": ("uint_contents", "UINT32"),
    "UINT16": ("uint_contents", "UINT32"),
    "UINT32": ("uint_contents", "UINT32"),
    "UINT64": ("uint64_contents", "UINT64"),
    "INT8": ("int_contents", "INT32"),
    "INT16": ("int_contents", "INT32"),
    "INT32": ("int_contents", "INT32"),
    "INT64": ("int64_contents", "INT64"),
    "FP32": ("fp32_contents", "FP32"),
    "FP64": ("fp64_contents", "FP64"),
    "BYTES": ("bytes_contents", "BYTES"),
}
"""The field of the typed contents for each datatype that has one, and the field's own datatype."""


def decode_infer_request(message: Any, memory: TensorMemory | None = None) -> InferRequest:
    """Decode a ModelInferRequest.

    Args:
        message: The message.
        memory: Reads inputs in shared memory; None if there is none.

    Raises:
        RequestError: The message is malformed, or a region can't be read.
    """
    for each in message.inputs:
        check_tensor_parameters(each.name, _decoded(each.parameters))
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_decoded(message.parameters),
        inputs=_tensors(message.inputs, message.raw_input_contents, memory),
        outputs=tuple(
            codec.requested_output(each.name, _decoded(each.parameters))
            for each in codec.check_tensor_count(message.outputs)
        ),
    )


def encode_infer_request(
    request: InferRequest, places: Sequence[SharedMemory] | None = None
) -> Any:
    """Encode a request as a ModelInferRequest.

    Args:
        request: The request.
        places: Where the caller has written the inputs as `raw_bytes`, one place for each; None to
            send them in the raw contents.

    Raises:
        TensorError: The protocol can't carry an input.
        ValueError: There are more or fewer places than inputs.
    """
    inputs = [codec.describe_tensor(each) for each in request.inputs]
    for described, place in zip(inputs, places or (), strict=places is not None):
        described["parameters"] = _encoded(memory_params(place))
    return ModelInferRequest(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        parameters=_encoded(request.parameters),
        inputs=inputs,
        outputs=map(_described_request, request.outputs),
        raw_input_contents=(
            [bytes(raw_bytes(each)) for each in request.inputs] if places is None else ()
        ),
    )


def decode_infer_response(message: Any, memory: TensorMemory | None = None) -> InferResponse:
    """Decode a ModelInferResponse.

    Args:
        message: The message.
        memory: Reads outputs in shared memory; None if there is none.

    Raises:
        RequestError: The message is malformed, or an output in shared memory can't be read.
    """
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        outputs=_tensors(message.outputs, message.raw_output_contents, memory),
        parameters=_decoded(message.parameters),
    )


def encode_infer_response(
    response: InferResponse,
    requested: Iterable[RequestedOutput] = (),
    memory: TensorMemory | None = None,
) -> Any:
    """Encode a response as a ModelInferResponse.

    Outputs in shared memory come last: Triton's client takes an output's index for its index in
    `raw_output_contents`.

    Args:
        response: The response.
        requested: The request's outputs.
        memory: Writes outputs that were requested in shared memory.

    Raises:
        RequestError: An output is larger than its place, or a region can't be written.
    """
    places = {each.name: each.memory for each in requested}
    outputs, raw = [], []
    for tensor in sorted(response.outputs, key=lambda each: places.get(each.name) is not None):
        described, placed = codec.describe_output(tensor, places.get(tensor.name), memory)
        if placed is None:
            raw.append(bytes(raw_bytes(tensor)))
        else:
            described["parameters"] = _encoded(placed)
        outputs.append(described)
    return ModelInferResponse(
        **codec.describe_response(response),
        parameters=_encoded(response.parameters),
        outputs=outputs,
        raw_output_contents=raw,
    )


def _tensors(
    described: Sequence[Any], raw: Sequence[bytes], memory: TensorMemory | None
) -> tuple[NamedTensor, ...]:
    places = [
        memory_of(checked_name(each.name), _decoded(each.parameters))
        for each in codec.check_tensor_count(described)
    ]
    # Triton's server sends raw contents for each output, empty for those in shared memory; its
    # client, and the protocol, only for the others.
    inline = places.count(None)
    if len(raw) not in {0, inline, len(places)}:
        raise TensorError(
            f"there are {len(raw)} raw contents for {inline} tensors outside shared memory; "
            "send one for each, in their order, or typed contents for all"
        )
    # Indexing copies the contents, so each is taken once, when its tensor is decoded.
    following = iter(raw)
    found = []
    for each, place in zip(described, places, strict=True):
        content = next(following, None) if place is None or len(raw) > inline else None
        found.append(codec.decode_tensor(each, place, memory, content, _typed))
    return tuple(found)


def _typed(described: Any, datatype: Datatype) -> Array:
    """Return the elements in a tensor's typed contents."""
    name, shape, contents = described.name, tuple(described.shape), described.contents
    field, wide_datatype = _CONTENTS.get(datatype, ("", datatype))
    if not field:
        raise TensorError(f"{datatype} has no typed contents; send {shown(name)} raw")
    if any(each.name != field for each, _ in contents.ListFields()):
        raise TensorError(f"{shown(name)} is {datatype}; of its typed contents fill {field} alone")
    elements = getattr(contents, field)
    count = element_count(name, datatype, shape)
    if len(elements) != count:
        raise TensorError(
            f"{shown(name)} of shape {shown(list(shape))} has {len(elements)} elements in {field}; "
            f"it needs {count}"
        )
    wide = np.fromiter(elements, DTYPES[wide_datatype], count)
    narrow = wide.astype(DTYPES[datatype], copy=False)
    if narrow is not wide and not np.array_equal(narrow, wide):
        raise TensorError(f"an element of {shown(name)} does not fit {datatype}")
    return read_only(narrow.reshape(shape))


def _described_request(output: RequestedOutput) -> Json:
    place = {} if output.memory is None else memory_params(output.memory)
    return {"name": output.name, "parameters": _encoded(place)}


def _decoded(given: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    found = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise RequestError(f"the parameter {shown(name)} has no value; leave it out or set one")
        found[name] = getattr(parameter, choice)
    return found


def _encoded(parameters: Parameters) -> dict[str, Json]:
    return {name: {_field_of(name, value): value} for name, value in parameters.items()}


def _field_of(name: str, value: bool | int | float | str) -> str:
    """Return the field of InferParameter that holds a value."""
    match value:
        case bool():
            return "bool_param"
        case str():
            return "string_param"
        case float():
            return "double_param"
    if -(2**63) <= value < 2**63:
        return "int64_param"
    if 0 < value < 2**64:
        return "uint64_param"
    raise TensorError(f"the parameter {shown(name)} is {shown(value)}, which no 64 bits hold")
