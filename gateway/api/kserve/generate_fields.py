"""What `generate` takes and gives, after Triton's extension: plain JSON instead of tensors.

A field that is called like an input of the model is that input, at the top or below `parameters`;
any other is a parameter of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....config import MAX_INT64, field_name, shown
from ....kserve.json_data import array_to_json, json_to_array
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
    """The request that a body of `generate` stands for.

    Args:
        spec: The model's, whose inputs are found among the fields.
        version: The one that was asked for; "" for any.
        body: The fields.

    Raises:
        FieldError: One can't be obeyed.
        TensorError: An input is none.
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
    return InferRequest(
        model_name=spec.name,
        model_version=version,
        id=request_id,
        inputs=tuple(
            _tensor(known[name], value) for name, value in fields.items() if name in known
        ),
        parameters={
            name: _parameter(name, value) for name, value in fields.items() if name not in known
        },
    )


def generate_json(response: InferResponse) -> dict[str, Any]:
    """An answer with its outputs by their names, one element as itself and several as a list.

    Raises:
        RequestError: An output is nothing that JSON can say.
    """
    told: dict[str, Any] = {"id": response.id} if response.id else {}
    told |= {"model_name": response.model_name, "model_version": response.model_version}
    told |= response.parameters
    for output in response.outputs:
        elements = array_to_json(output.name, output.data)
        told[output.name] = elements[0] if len(elements) == 1 else elements
    return told


def _tensor(spec: TensorSpec, value: Any) -> NamedTensor:
    if spec.datatype == "BYTES" and isinstance(value, dict):
        # As Triton has it, for inputs that are JSON themselves.
        value = msgspec.json.encode(value).decode()
    shape = _shape(value)
    # What is given as one element, or as some in a row, is the last dimension of what is wanted.
    shape = [1] * (len(spec.shape) - len(shape)) + shape
    data = value if isinstance(value, list) else [value]
    return NamedTensor(spec.name, json_to_array(spec.name, spec.datatype, shape, data))


def _shape(value: Any) -> list[int]:
    """Of lists in lists, by the first of each."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) <= MAX_DIMENSIONS:
        shape.append(len(value))
        value = value[0] if value else None
    return shape


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
