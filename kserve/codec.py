"""Requests and answers to and from the messages of gRPC. Nothing here waits, or reads a clock.

Where a tensor's elements are is looked for in this order: in shared memory, in the raw contents, in
the typed contents. The messages may be those of `protobuf.py` or another library's of the same
fields. An array that was decoded is read-only, and a view wherever that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from ..config import RequestError, shown
from .checks import check_not_classified, check_parameters, checked_name, counted
from .elements import MAX_ELEMENTS, MAX_STRINGS, array_of, byte_size, raw_bytes, read_only
from .memory import (
    MEMORY_PARAMS,
    TensorMemory,
    memory_of,
    memory_params,
    read_tensor,
    write_tensor,
)
from .protobuf import (
    ModelConfigResponse,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    RepositoryIndexResponse,
)
from .tensors import (
    DTYPES,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    Parameters,
    RequestedOutput,
    SharedMemory,
    TensorError,
    TensorSpec,
    checked_datatype,
    element_count,
)

_CONTENTS: dict[Datatype, str] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of the typed contents for each datatype that has one."""

_WIDE: dict[str, np.dtype[Any]] = {
    "uint_contents": DTYPES["UINT32"],
    "int_contents": DTYPES["INT32"],
}


class ModelIndex(NamedTuple):
    """A line of a repository's index; `reason` says why a model is not ready."""

    name: str
    ready: bool = True
    version: str = "1"
    reason: str = ""


class RequestFields(TypedDict, total=False):
    """What a request says besides its inputs, all of which may be left out.

    Attributes:
        requested_outputs: The outputs wanted, by name or with the memory for each; none for all.
        id: What the answer repeats.
        model_version: Which version; "" for any.
        parameters: What else there is to say.
    """

    requested_outputs: Iterable[RequestedOutput | str]
    id: str
    model_version: str
    parameters: Parameters | None


def decode_infer_request(message: Any, memory: TensorMemory | None = None) -> InferRequest:
    """What a ModelInferRequest asks.

    Args:
        message: The message.
        memory: What reads its inputs in shared memory; None where there is none.

    Raises:
        RequestError: It is not well-formed, or a region can't be read.
    """
    for each in message.inputs:
        check_parameters(each.name, _parameters(each.parameters), MEMORY_PARAMS)
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_parameters(message.parameters),
        inputs=_tensors(message.inputs, message.raw_input_contents, memory),
        outputs=tuple(map(_requested_output, counted(message.outputs))),
    )


def encode_infer_request(
    model_name: str, inputs: Sequence[NamedTensor], **fields: Unpack[RequestFields]
) -> Any:
    """A ModelInferRequest that has its inputs in its raw contents.

    Args:
        model_name: Which model.
        inputs: Its inputs.
        fields: What it says besides.

    Raises:
        TensorError: The protocol can't carry it.
    """
    message = _request(model_name, **fields)
    for tensor in inputs:
        _describe(message.inputs.add(), tensor)
        message.raw_input_contents.append(bytes(raw_bytes(tensor)))
    return message


def encode_infer_request_shm(
    model_name: str,
    inputs: Sequence[NamedTensor],
    region: str,
    offsets: Sequence[int],
    **fields: Unpack[RequestFields],
) -> Any:
    """A ModelInferRequest all of whose inputs are in shared memory; it carries no elements.

    Args:
        model_name: Which model.
        inputs: Its inputs, which the caller has put there as `elements.raw_bytes` has them.
        region: Where they are, by the name under which the server knows it.
        offsets: For each input its place in the region, in bytes.
        fields: What it says besides.

    Raises:
        TensorError: The protocol can't carry it.
        ValueError: There is not one offset for each input.
    """
    message = _request(model_name, **fields)
    for tensor, offset in zip(inputs, offsets, strict=True):
        described = message.inputs.add()
        _describe(described, tensor)
        place = SharedMemory(region, byte_size(tensor), offset)
        _set_parameters(described.parameters, memory_params(place))
    return message


def decode_infer_response(message: Any, memory: TensorMemory | None = None) -> InferResponse:
    """What a ModelInferResponse says.

    Args:
        message: The message.
        memory: What reads the outputs that were put into shared memory.

    Raises:
        RequestError: It is not well-formed, or has an output in shared memory that can't be read.
    """
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        outputs=_tensors(message.outputs, message.raw_output_contents, memory),
        parameters=_parameters(message.parameters),
    )


def encode_infer_response(
    response: InferResponse,
    requested: Iterable[RequestedOutput] = (),
    memory: TensorMemory | None = None,
) -> Any:
    """The ModelInferResponse of an answer, whose outputs are put where each was wanted.

    Those in shared memory stand behind the others: Triton's client takes an output's place among
    all outputs for its place in `raw_output_contents`.

    Args:
        response: The answer.
        requested: What the client has asked of outputs.
        memory: What writes those that it wants in shared memory.

    Raises:
        RequestError: An output is larger than its place, or a region can't be written.
    """
    message = ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    _set_parameters(message.parameters, response.parameters)
    places = {each.name: each.memory for each in requested}
    for tensor in sorted(response.outputs, key=lambda each: places.get(each.name) is not None):
        described = message.outputs.add()
        _describe(described, tensor)
        if (place := places.get(tensor.name)) is None:
            message.raw_output_contents.append(bytes(raw_bytes(tensor)))
        else:
            filled = write_tensor(tensor, place, memory)
            _set_parameters(described.parameters, memory_params(filled))
    return message


def encode_model_metadata(spec: ModelSpec) -> Any:
    """The ModelMetadataResponse of a model."""
    message = ModelMetadataResponse(name=spec.name, versions=spec.versions, platform=spec.platform)
    for described, tensors in ((message.inputs, spec.inputs), (message.outputs, spec.outputs)):
        for each in tensors:
            described.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return message


def encode_model_config(spec: ModelSpec) -> Any:
    """The ModelConfigResponse of a model. It tells nothing of batches: a dimension for them is one
    of the shape."""
    message = ModelConfigResponse()
    config = message.config
    config.name, config.platform, config.backend = spec.name, spec.platform, spec.platform
    config.model_transaction_policy.decoupled = spec.decoupled
    for each in spec.inputs:
        config.input.add(
            name=each.name, data_type=_data_type(each), dims=each.shape, optional=each.optional
        )
    for each in spec.outputs:
        config.output.add(name=each.name, data_type=_data_type(each), dims=each.shape)
    return message


def encode_repository_index(
    models: Iterable[str | tuple[str, bool] | ModelIndex] | Mapping[str, bool],
) -> Any:
    """The RepositoryIndexResponse of models: of names, all of which are ready, or of names and
    whether each is."""
    message = RepositoryIndexResponse()
    entries = models.items() if isinstance(models, Mapping) else models
    for entry in entries:
        each = ModelIndex(entry) if isinstance(entry, str) else ModelIndex(*entry)
        state = "READY" if each.ready else "UNAVAILABLE"
        message.models.add(name=each.name, version=each.version, state=state, reason=each.reason)
    return message


def _tensors(
    described: Sequence[Any], raw: Sequence[bytes], memory: TensorMemory | None
) -> tuple[NamedTensor, ...]:
    places = [
        memory_of(checked_name(each.name), _parameters(each.parameters))
        for each in counted(described)
    ]
    # Triton's server sends one for each output, empty for those in shared memory; its client, and
    # the protocol, one for each that is not.
    inline = places.count(None)
    if len(raw) not in {0, inline, len(places)}:
        raise TensorError(
            f"there are {len(raw)} raw contents for {inline} tensors outside shared memory; "
            "send one for each, in their order, or typed contents for all"
        )
    contents = _raw_contents(raw, places)
    return tuple(
        _tensor(each, place, content, memory)
        for each, place, content in zip(described, places, contents, strict=True)
    )


def _raw_contents(
    raw: Sequence[bytes], places: Sequence[SharedMemory | None]
) -> Iterator[bytes | None]:
    """For each tensor its raw contents, each of which is a copy that is made here."""
    if not raw or len(raw) == len(places):
        yield from raw or (None for _ in places)
        return
    following = iter(raw)
    for place in places:
        yield next(following) if place is None else None


def _tensor(
    described: Any, place: SharedMemory | None, raw: bytes | None, memory: TensorMemory | None
) -> NamedTensor:
    name, shape = described.name, tuple(described.shape)
    datatype = checked_datatype(name, described.datatype)
    if place is not None:
        data = read_tensor(name, datatype, shape, place, memory)
    elif raw is not None:
        data = array_of(name, datatype, shape, raw)
    else:
        data = _typed(name, datatype, shape, described.contents)
    return NamedTensor(name, data)


def _typed(name: str, datatype: Datatype, shape: tuple[int, ...], contents: Any) -> Array:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise TensorError(f"{datatype} has no typed contents; send {shown(name)} raw")
    if any(each.name != field for each, _ in contents.ListFields()):
        raise TensorError(f"{shown(name)} is {datatype}; of its typed contents fill {field} alone")
    elements = getattr(contents, field)
    count = element_count(name, shape, MAX_STRINGS if datatype == "BYTES" else MAX_ELEMENTS)
    if len(elements) != count:
        raise TensorError(
            f"{shown(name)} of shape {shown(list(shape))} has {len(elements)} elements in {field}; "
            f"it needs {count}"
        )
    wide = np.fromiter(elements, _WIDE.get(field, DTYPES[datatype]), count)
    return read_only(_narrow(name, datatype, wide).reshape(shape))


def _narrow(name: str, datatype: Datatype, wide: Array) -> Array:
    narrow = wide.astype(DTYPES[datatype], copy=False)
    if narrow is not wide and not np.array_equal(narrow, wide):
        raise TensorError(f"an element of {shown(name)} does not fit {datatype}")
    return narrow


def _requested_output(described: Any) -> RequestedOutput:
    name = checked_name(described.name)
    parameters = _parameters(described.parameters)
    check_not_classified(name, parameters)
    check_parameters(name, parameters, MEMORY_PARAMS)
    return RequestedOutput(name, memory_of(name, parameters))


def _request(
    model_name: str,
    *,
    requested_outputs: Iterable[RequestedOutput | str] = (),
    id: str = "",
    model_version: str = "",
    parameters: Parameters | None = None,
) -> Any:
    message = ModelInferRequest(model_name=model_name, model_version=model_version, id=id)
    _set_parameters(message.parameters, parameters or {})
    for each in requested_outputs:
        wanted = RequestedOutput(each) if isinstance(each, str) else each
        described = message.outputs.add(name=wanted.name)
        if wanted.memory is not None:
            _set_parameters(described.parameters, memory_params(wanted.memory))
    return message


def _describe(described: Any, tensor: NamedTensor) -> None:
    described.name, described.datatype = tensor.name, tensor.datatype
    described.shape.extend(tensor.shape)


def _parameters(given: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    found = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise RequestError(f"the parameter {shown(name)} has no value; leave it out or set one")
        found[name] = getattr(parameter, choice)
    return found


def _set_parameters(parameters: Any, given: Parameters) -> None:
    for name, value in given.items():
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        elif -(2**63) <= value < 2**63:
            parameter.int64_param = value
        elif 0 < value < 2**64:
            parameter.uint64_param = value
        else:
            raise TensorError(
                f"the parameter {shown(name)} is {shown(value)}, which no 64 bits hold"
            )


def _data_type(tensor: TensorSpec) -> str:
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
