"""The elements of a tensor as JSON has them, and back.

FP16 and BF16 have no such form. Numbers that are none, and infinity, are `NaN`, `Infinity` and
`-Infinity`, which is how Triton writes them and its clients read them, though JSON knows none.
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
from .elements import MAX_ELEMENTS, MAX_STRINGS, read_only
from .tensors import DTYPES, Array, Datatype, NamedTensor, Parameters, TensorError, element_count

_NOT_IN_JSON = ("FP16", "BF16")


def json_to_array(name: str, datatype: Datatype, shape: Sequence[int], data: object) -> Array:
    """The array of elements that came as JSON.

    Args:
        name: The tensor's.
        datatype: Of the elements.
        shape: Its shape, which need not be right.
        data: Decoded JSON: a list of all elements, row by row, or lists in lists as the shape has
            them.

    Raises:
        TensorError: They don't go together.
    """
    if datatype in _NOT_IN_JSON:
        raise _binary_only(name, datatype)
    most = MAX_STRINGS if datatype == "BYTES" else MAX_ELEMENTS
    count = element_count(name, shape, most)
    flat = _flat(data, shape)
    if flat is None or len(flat) != count:
        raise TensorError(
            f"the data of {shown(name)} is not a list of {count} elements, nor lists in lists of "
            f"the shape {shown(list(shape))}"
        )
    if datatype == "BYTES":
        found = _strings(name, flat)
    elif datatype in ("FP32", "FP64"):
        found = _floats(name, datatype, flat)
    else:
        found = _integers(name, datatype, flat)
    return read_only(found.reshape(shape))


def array_to_json(name: str, data: Array) -> list[Any]:
    """The elements of an array, row by row, as JSON can have them; BYTES as text.

    Raises:
        TensorError: It has no form in JSON; binary data has one.
    """
    datatype = NamedTensor(name, data).datatype
    if datatype in _NOT_IN_JSON:
        raise _binary_only(name, datatype)
    flat: list[Any] = data.reshape(-1).tolist()
    if datatype == "BYTES":
        return [_text(name, each) for each in flat]
    return flat


def json_elements(tensor: NamedTensor) -> msgspec.Raw:
    """What `array_to_json` gives, encoded. Raises as that."""
    flat = array_to_json(tensor.name, tensor.data)
    return _written(flat, tensor.data.dtype.kind != "f" or bool(np.isfinite(tensor.data).all()))


def json_parameters(parameters: Parameters) -> msgspec.Raw:
    """Parameters, encoded."""
    numbers = [each for each in parameters.values() if isinstance(each, float)]
    return _written(dict(parameters), all(map(math.isfinite, numbers)))


def read_json(text: bytes | memoryview) -> Any:
    """Decoded JSON, in which numbers may be `NaN`, `Infinity` and `-Infinity`.

    Raises:
        ValueError: It is none; its text says why.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError:
        text = bytes(text)
        if b"NaN" not in text and b"Infinity" not in text:
            raise
    try:
        return json.loads(text.decode(), parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _written(value: object, finite: bool) -> msgspec.Raw:
    # msgspec writes null for what is not finite.
    if finite:
        return msgspec.Raw(msgspec.json.encode(value))
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"the number {shown(text)} is out of range")
    return found


def _flat(data: object, shape: Sequence[int]) -> list[Any] | None:
    """All elements, row by row; None where lists in lists have another shape."""
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
    """Of booleans as well, which may be 0 and 1."""
    dtype = DTYPES[datatype]
    if datatype == "BOOL":
        low, high = 0, 1
        _check_types(name, datatype, flat, bool, int)
    else:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        _check_types(name, datatype, flat, int)
    if flat and (min(flat) < low or max(flat) > high):
        wrong = next(each for each in flat if not low <= each <= high)
        _refuse(name, datatype, wrong)
    return np.array(flat, dtype=dtype)


def _floats(name: str, datatype: Datatype, flat: list[Any]) -> Array:
    _check_types(name, datatype, flat, int, float)
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


def _strings(name: str, flat: list[Any]) -> Array:
    _check_types(name, "BYTES", flat, str)
    found = np.empty(len(flat), dtype=np.object_)
    try:
        found[:] = [each.encode() for each in flat]
    except UnicodeEncodeError:
        raise TensorError(f"{shown(name)} has a text that is not valid Unicode") from None
    return found


def _check_types(name: str, datatype: Datatype, flat: list[Any], *allowed: type) -> None:
    if set(map(type, flat)) - set(allowed):
        _refuse(name, datatype, next(each for each in flat if type(each) not in allowed))


def _text(name: str, element: object) -> str:
    try:
        return element.decode() if isinstance(element, bytes) else str(element)
    except UnicodeDecodeError:
        raise TensorError(
            f"{shown(name)} has bytes that are not text in UTF-8, so JSON can't have them; ask for "
            "it as binary data (`binary_data`)"
        ) from None


def _refuse(name: str, datatype: Datatype, element: object) -> NoReturn:
    kind = "text" if datatype == "BYTES" else datatype
    raise TensorError(f"an element of {shown(name)} is {shown(element)}, which is not {kind}")


def _binary_only(name: str, datatype: Datatype) -> TensorError:
    return TensorError(
        f"{shown(name)} is {datatype}, which has no form in JSON; use binary data (`binary_data`)"
    )
