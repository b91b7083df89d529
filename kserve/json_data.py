"""A tensor's elements as JSON, and back.

FP16 and BF16 have no JSON form. Numbers that aren't finite are written `NaN`, `Infinity` and
`-Infinity`, as Triton does and its clients read, though JSON has none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

import msgspec
import numpy as np

from ..config import shown
from .tensors import (
    DTYPES,
    Array,
    Datatype,
    NamedTensor,
    Parameters,
    TensorError,
    element_count,
    read_only,
)

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
    finite = tensor.data.dtype.kind != "f" or bool(np.isfinite(tensor.data).all())
    return _encode(array_to_json(tensor), finite)


def json_parameters(parameters: Parameters) -> msgspec.Raw:
    """Return parameters, encoded."""
    floats = [each for each in parameters.values() if isinstance(each, float)]
    return _encode(dict(parameters), all(map(math.isfinite, floats)))


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


def _encode(value: object, finite: bool) -> msgspec.Raw:
    # msgspec writes null for numbers that aren't finite.
    if finite:
        return msgspec.Raw(msgspec.json.encode(value))
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"the number {shown(text)} is out of range")
    return found


def _flat(data: object, shape: Sequence[int]) -> list[Any] | None:
    """All elements, row by row; None if nested lists have another shape."""
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
