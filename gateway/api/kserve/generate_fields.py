"""Fields of `generate`, Triton's extension with plain JSON in place of tensors.

A field with the name of an input is that input, at the top level or below `parameters`; any other
field is a parameter of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....config import MAX_INT64, field_name, shown
from ....kserve.json_data import array_to_json, json_to_array
from ....kserve.tensor_codec import describe_response
from ....kserve.tensors import (
    MAX_DIMENSIONS,
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    TensorSpec,
)
from ...server.http import FieldError

_PARAMETERS = "parameters"
_ID = "id"


def read_generate(spec: ModelSpec, version: str, body: Mapping[str, Any]) -> InferRequest:
    """Return the request in the body of `generate`.

    Args:
        spec: The model's.
        version: The requested version; "" for any.
        body: The fields.

    Raises:
        FieldError: A field is invalid.
        TensorError: An input is invalid.
    """
    known = {each.name: each for each in spec.inputs}
    fields = dict(body)
    request_id = "" if _ID in known else fields.pop(_ID, "")
    if not isinstance(request_id, str):
        raise FieldError(f"{_ID} is {shown(request_id)}; it must be a string", param=_ID)
    more = {} if _PARAMETERS in known else fields.pop(_PARAMETERS, {})
    if not isinstance(more, dict):
        raise FieldError(f"{_PARAMETERS} is {shown(more)}; it must be an object", param=_PARAMETERS)
    for name in more:
        if name in fields:
            param = field_name(name)
            raise FieldError(
                f"{param} is there twice, in {_PARAMETERS} as well; give it once", param=param
            )
    fields |= more
    inputs = {name: fields.pop(name) for name in list(fields) if name in known}
    return InferRequest(
        model_name=spec.name,
        model_version=version,
        id=request_id,
        inputs=tuple(_tensor(known[name], value) for name, value in inputs.items()),
        parameters={name: _parameter(name, value) for name, value in fields.items()},
    )


def generate_json(response: InferResponse) -> dict[str, Any]:
    """Return a response with its outputs by name: one element as itself, several as a list.

    Raises:
        RequestError: An output has no JSON form.
    """
    found = {**describe_response(response), **response.parameters}
    for output in response.outputs:
        elements = array_to_json(output)
        found[output.name] = elements[0] if len(elements) == 1 else elements
    return found


def _tensor(spec: TensorSpec, value: Any) -> NamedTensor:
    if spec.datatype == "BYTES" and isinstance(value, dict):
        # Triton accepts JSON objects for inputs that are JSON themselves.
        value = msgspec.json.encode(value).decode()
    # The shape of nested lists, by the first element of each.
    shape: list[int] = []
    inner = value
    while isinstance(inner, list) and len(shape) <= MAX_DIMENSIONS:
        shape.append(len(inner))
        inner = inner[0] if inner else None
    # A single element, or a flat list, is the last dimension of the input.
    shape = [1] * (len(spec.shape) - len(shape)) + shape
    data = value if isinstance(value, list) else [value]
    return NamedTensor(spec.name, json_to_array(spec.name, spec.datatype, shape, data))


def _parameter(name: str, value: Any) -> bool | int | float | str:
    fits = not isinstance(value, int) or -(2**63) <= value <= MAX_INT64
    if isinstance(value, bool | int | float | str) and fits:
        return value
    param = field_name(name)
    raise FieldError(
        f"{param} is no input of the model, and {shown(value)} is no parameter; that is a string, "
        "a boolean, or a number that fits 64 bits",
        param=param,
    )
