"""Requests of KServe V2, good ones and crooked ones, as protobuf and as HTTP bodies.

Written without any of the gateway's own codecs, so that the two can disagree.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from nano_inference.kserve.protobuf import ModelInferRequest
from nano_inference.kserve.tensors import DATATYPES, DTYPES, Array

from ...kserve.drawn import TYPED
from .wire import spoiled

How = Literal["raw", "typed", "shared"]

REGION, REGION_BYTES = "region", 1 << 14


@dataclass
class Input:
    """A tensor of a draft.

    Attributes:
        raw: Its elements, in little endian.
        values: The same as they stand in typed contents and JSON.
        how: How they are sent.
        offset: In the region, where they are shared.
    """

    name: str
    datatype: str
    shape: list[int]
    raw: bytes
    values: list[Any]
    how: How
    offset: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Draft:
    """A request that is to be written down."""

    inputs: list[Input]
    outputs: list[tuple[str, dict[str, Any]]]
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    behind: list[bytes] = field(default_factory=list)


Region = memoryview | Array
"""The bytes of the region that inputs may be in."""


def raw_of(array: Array) -> bytes:
    """The elements as they are sent."""
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(each)) + each for each in array.ravel())
    return array.tobytes()


def any_array(rng: random.Random, datatype: str, most: int = 24) -> Array:
    shape = [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    count = int(np.prod(shape)) if shape else 1
    if datatype == "BYTES":
        texts = [rng.choice((b"", b"a", "é\U0001f600".encode(), b"x" * 40)) for _ in range(count)]
        made = np.empty(count, object)
        made[:] = texts
        return made.reshape(shape)
    dtype = DTYPES[datatype]  # type: ignore[index]
    if datatype == "BOOL":
        return np.array([rng.random() < 0.5 for _ in range(count)], dtype).reshape(shape)
    if datatype.startswith(("FP", "BF")):
        return np.array([rng.uniform(-9, 9) for _ in range(count)], dtype).reshape(shape)
    return np.frombuffer(rng.randbytes(count * dtype.itemsize), dtype).reshape(shape)


def draft(rng: random.Random, region: Region, *, echoed: bool = False) -> Draft:
    """A good one. What of it is shared is written into the region.

    Args:
        echoed: A model takes it that has an input in one dimension for each datatype, of that name.
    """
    inline: How = rng.choice(("raw", "typed"))
    inputs, offset = [], 0
    names = [each for each in DATATYPES if inline == "raw" or each in TYPED]
    rng.shuffle(names)
    for place in range(rng.choice((0, 1, 1, 2, 3, 5))):
        datatype = names[place] if echoed else rng.choice(names)
        array = any_array(rng, datatype)
        array = array.ravel() if echoed else array
        raw, how = raw_of(array), inline
        if rng.random() < 0.25 and offset + len(raw) <= REGION_BYTES:
            how = "shared"
        made = Input(
            datatype if echoed else f"in{place}",
            datatype,
            list(array.shape),
            raw,
            array.ravel().tolist(),
            how,
            offset,
        )
        if how == "shared":
            region[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)
            offset += len(raw)
        inputs.append(made)
    outputs: list[tuple[str, dict[str, Any]]] = [
        (names[place] if echoed else f"out{place}", {}) for place in range(rng.choice((0, 0, 1, 2)))
    ]
    parameters: dict[str, Any] = rng.choice(
        ({}, {"timeout_ns": 5}, {"a": "é", "b": True, "c": 1.5})
    )
    return Draft(inputs, outputs, rng.choice(("", "mine", "é" * 20)), dict(parameters))


# --- written down --------------------------------------------------------------------------------


def _set(target: Any, parameters: dict[str, Any]) -> None:
    for name, value in parameters.items():
        kind = {bool: "bool_param", str: "string_param", float: "double_param"}.get(
            type(value), "int64_param"
        )
        if kind == "int64_param" and value >= 2**63:
            kind = "uint64_param"
        setattr(target[name], kind, value)


def _placed(tensor: Input) -> dict[str, Any]:
    if tensor.how != "shared":
        return tensor.parameters
    where = {"shared_memory_region": REGION, "shared_memory_byte_size": len(tensor.raw)}
    if tensor.offset:
        where["shared_memory_offset"] = tensor.offset
    return where | tensor.parameters


def as_protobuf(given: Draft, model: str = "m") -> Any:
    message = ModelInferRequest(model_name=model, id=given.id)
    _set(message.parameters, given.parameters)
    for tensor in given.inputs:
        made = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        _set(made.parameters, _placed(tensor))
        if tensor.how == "raw":
            message.raw_input_contents.append(tensor.raw)
        elif tensor.how == "typed":
            getattr(made.contents, TYPED[tensor.datatype]).extend(tensor.values)
    message.raw_input_contents.extend(given.behind)
    for name, parameters in given.outputs:
        _set(message.outputs.add(name=name).parameters, parameters)
    return message


def as_json(given: Draft) -> tuple[dict[str, Any], bytes]:
    """The object, and the bytes after it."""
    inputs, behind = [], b""
    for tensor in given.inputs:
        made: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
        made["shape"] = tensor.shape
        parameters = dict(_placed(tensor))
        if tensor.how == "raw":
            parameters = {"binary_data_size": len(tensor.raw)} | parameters
            behind += tensor.raw
        elif tensor.how == "typed":
            made["data"] = [
                each.decode() if isinstance(each, bytes) else each for each in tensor.values
            ]
        if parameters:
            made["parameters"] = parameters
        inputs.append(made)
    body: dict[str, Any] = {"inputs": inputs}
    if given.id:
        body["id"] = given.id
    if given.parameters:
        body["parameters"] = given.parameters
    if given.outputs:
        body["outputs"] = [
            {"name": name, "parameters": parameters} for name, parameters in given.outputs
        ]
    return body, behind + b"".join(given.behind)


def as_http(given: Draft) -> tuple[bytes, int | None]:
    """A body, and how much of it is JSON; None for all of it."""
    body, behind = as_json(given)
    head = json.dumps(body).encode()
    return head + behind, len(head) if behind else None


# --- crooked -------------------------------------------------------------------------------------

Break = Callable[[Draft, random.Random], None]

BAD_SHAPES: tuple[list[int], ...] = (
    *([-1], [2, -1], [2**62, 2**62], [2**63 - 1], [1] * 32 + [2], [2**31, 2**31, 2**31]),
    *([0, -(2**63)], [2**40], [1 << 33, 0, -1]),
)
BAD_TYPES = ("", "FP8", "int32", "BYTES\x00", "TYPE_INT32", "x" * 5000, "STRING", "INT128")


def _some(given: Draft, rng: random.Random, how: str = "") -> Input:
    """One of its inputs, sent in a way; a new one where there is none."""
    found = [each for each in given.inputs if how in ("", each.how)]
    if not found:
        inline = {each.how for each in given.inputs} - {"shared"}
        if how in ("raw", "typed") and inline - {how}:
            given.inputs = []
        array = np.arange(3, dtype=np.int32)
        wanted: Any = how or "raw"
        made = Input(f"more{len(given.inputs)}", "INT32", [3], array.tobytes(), [0, 1, 2], wanted)
        given.inputs.append(made)
        return made
    return rng.choice(found)


def bad_shape(given: Draft, rng: random.Random) -> None:
    _some(given, rng).shape = list(rng.choice(BAD_SHAPES))


def more_elements(given: Draft, rng: random.Random) -> None:
    """Than there are of it, by as little as one."""
    tensor = _some(given, rng)
    tensor.shape = [(int(np.prod(tensor.shape)) if tensor.shape else 1) + rng.choice((1, 7, 10**6))]


def bad_type(given: Draft, rng: random.Random) -> None:
    tensor = _some(given, rng, "raw")
    tensor.datatype = rng.choice(BAD_TYPES)


def bad_size(given: Draft, rng: random.Random) -> None:
    tensor = _some(given, rng, "raw")
    shorter = tensor.raw and rng.random() < 0.5
    tensor.raw = tensor.raw[:-1] if shorter else tensor.raw + b"\x01"


def bad_texts(given: Draft, rng: random.Random) -> None:
    """Lengths of which the bytes know nothing."""
    tensor = _some(given, rng, "raw")
    tensor.datatype, tensor.shape = "BYTES", [2]
    raws = (
        *(b"\xff\xff\xff\xffab\x01\x00\x00\x00a", b"\x01\x00\x00\x00a", b"\x01\x00\x00", b""),
        *(b"\x00\x00\x00\x00" * 3, b"\x01\x00\x00\x00a\x02\x00\x00\x00b", b"\x04\x00\x00\x00abc"),
        *(b"\x00\x00\x00\x80" + b"a" * 40, b"\x01\x00\x00\x00a\x00\x00\x00\x00a"),
    )
    tensor.raw = rng.choice(raws)


def one_more_raw(given: Draft, rng: random.Random) -> None:
    """Than there are tensors, of which those in shared memory may have one that nobody reads."""
    _some(given, rng, "raw")
    more = 1 + sum(each.how == "shared" for each in given.inputs)
    given.behind += [rng.choice((b"", b"\x00" * 4, b"x" * 100)) + b"x" for _ in range(more)]


def elsewhere(given: Draft, rng: random.Random) -> None:
    """Shared memory that is not there, or is not as large."""
    tensor = _some(given, rng, "shared")
    region, size, offset = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
    wrong: tuple[dict[str, Any], ...] = (
        *({region: name} for name in ("other", "", "\x00", "x" * 5000)),
        *({size: len(tensor.raw) + n} for n in (1, 2**40)),
        *({size: -1}, {offset: -1}, {offset: REGION_BYTES + 1}, {offset: 2**63 - 1}, {size: 2**62}),
        *({region: True}, {size: "4"}, {offset: "0"}, {size: True}, {offset: 1.5}, {region: 7}),
    )
    tensor.parameters.update(rng.choice(wrong))


def classes(given: Draft, rng: random.Random) -> None:
    given.outputs.append(("classes", {"classification": rng.choice((1, 5))}))


ELSEWHERE = (
    *("invalid_tensor", "invalid_region", "unknown_region", "invalid_request"),
    "request_too_large",  # over whatever one request may have there
)
BREAKS: tuple[tuple[Break, tuple[str, ...]], ...] = (
    (bad_shape, ("invalid_tensor",)),
    (more_elements, ("invalid_tensor",)),
    (bad_type, ("invalid_tensor",)),
    (bad_size, ("invalid_tensor",)),
    (bad_texts, ("invalid_tensor",)),
    (one_more_raw, ("invalid_tensor", "malformed", "invalid_request")),
    (elsewhere, ELSEWHERE),
    (classes, ("unsupported",)),
)
"""The changes that make a good draft a bad one, and the codes with which it must be refused."""


class Crooked(NamedTuple):
    """A request, and what becomes of it.

    Attributes:
        kind: What is odd about it.
        draft: The request.
        codes: It is refused with one of them; empty for one that is good.
    """

    kind: str
    draft: Draft
    codes: tuple[str, ...]


def crooked(rng: random.Random, region: Region, *, echoed: bool = False) -> Crooked:
    """One of all kinds; `echoed` as in `draft`."""
    made = draft(rng, region, echoed=echoed)
    if rng.random() < 0.2:
        return Crooked("good", made, ())
    change, codes = rng.choice(BREAKS)
    change(made, rng)
    return Crooked(change.__name__, made, codes)


# --- JSON that is crooked ------------------------------------------------------------------------

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, -0.0, float("nan"), float("inf"), 2**63, 2**64, 10**40),
    *("", "a", "\x00", "\u202e", "x" * 5000, [], {}, [[]], [{}], [[[[[]]]]], {"": None}),
    *({"a": [1]}, [None], ["a", 1], [1, [2]], [[1], [2, 3]], [True, 1], list(range(300))),
    [[1] * 3] * 3,
)
ODD_FIELDS = (
    *("name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "id", "\x00", ""),
)
ODD_LENGTHS = (-1, 0, 1, 2, 2**31, 2**63, 10**40)


def odd_json(body: Any, rng: random.Random) -> Any:
    """The same with some value of it another, or gone, or one more."""
    if isinstance(body, dict) and body and rng.random() < 0.85:
        name = rng.choice(list(body))
        made = dict(body)
        match rng.randrange(8):
            case 0:
                del made[name]
            case 1:
                made[rng.choice((*ODD_FIELDS, "binary_data_size", "x" * 3000))] = odd_value(rng)
            case _:
                made[name] = odd_json(body[name], rng)
        return made
    if isinstance(body, list) and body and rng.random() < 0.85:
        place = rng.randrange(len(body))
        match rng.randrange(8):
            case 0:
                return body[:place] + body[place + 1 :]
            case 1:
                return body[:place] + [body[place]] * rng.choice((2, 30, 1500)) + body[place:]
            case _:
                return [*body[:place], odd_json(body[place], rng), *body[place + 1 :]]
    if isinstance(body, int) and not isinstance(body, bool) and rng.random() < 0.3:
        return body + rng.choice((-1, 1))
    return odd_value(rng)


def odd_value(rng: random.Random) -> Any:
    return rng.choice(ODD_VALUES)


def odd_http(given: Draft, rng: random.Random) -> tuple[bytes, int | None]:
    """A body as `as_http` gives it, of which something is another."""
    body, behind = as_json(given)
    head = json.dumps(body).encode()
    match rng.randrange(5):
        case 0:
            raw = spoiled(head, rng)
            return raw + behind, len(raw) if behind else None
        case 1:
            size = len(head)
            odd = (*ODD_LENGTHS, size - 1, size + 1, size + len(behind))
            return head + behind, rng.choice(odd)
        case 2:
            return head + behind + b"x", None
        case _:
            raw = json.dumps(odd_json(body, rng)).encode()
            return raw + behind, len(raw) if behind else None
