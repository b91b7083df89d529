"""Tensors and model specs on the wire: what the codecs of gRPC and HTTP share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..config import shown
from .parameters import MEMORY_PARAMS, check_tensor_parameters, memory_of, memory_params
from .tensors import (
    Array,
    Datatype,
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
    raw_bytes,
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
    inline: Callable[[Datatype], Array],
) -> NamedTensor:
    """Return a received tensor.

    Args:
        described: Has `name`, `datatype` and `shape`.
        place: Its place in shared memory; None if it is inline.
        memory: Reads it there; None if there is no shared memory.
        inline: Returns the elements of an inline tensor.

    Raises:
        RequestError: The tensor is malformed, or its region can't be read.
    """
    name, shape = described.name, described.shape
    datatype = checked_datatype(name, described.datatype)
    if place is None:
        return NamedTensor(name, inline(datatype))
    check_size(name, datatype, shape, place.byte_size)
    raw = _present(name, memory).read(place).data
    return NamedTensor(name, array_of(name, datatype, tuple(shape), raw))


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
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def describe_response(response: InferResponse) -> Json:
    """Return a response without its outputs and parameters; the id is left out if empty."""
    found = {"model_name": response.model_name, "model_version": response.model_version}
    return found | {"id": response.id} if response.id else found


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
        return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": list(tensor.shape)}

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
