"""How many fields a message has is found before it is decoded."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import RequestError
from nano_inference.gateway.api.kserve.grpc_fields import (
    MOST_BYTES,
    MOST_FIELDS,
    _count,
    check_fields,
)
from nano_inference.kserve.checks import MAX_TENSORS
from nano_inference.kserve.protobuf import METHODS, message

INFER = METHODS["ModelInfer"]

MANY = {
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "parameters": b"\x22\x00",
    "raw contents": b"\x3a\x00",
    "fields of no meaning": b"\xf8\x01\x00",
}


@pytest.mark.parametrize("what", MANY)
@pytest.mark.parametrize("within", [False, True])
def test_too_many_of_anything(what: str, within: bool) -> None:
    data = MANY[what] * (MOST_FIELDS + 1)
    if within:
        # They are other fields of an input, and as many.
        data = _tensor(data)
    with pytest.raises(RequestError) as refused:
        check_fields(INFER, data)
    assert refused.value.code == "request_too_large"


def _tensor(fields: bytes) -> bytes:
    """An input of these fields."""
    length, size = b"", len(fields)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x2a" + length + bytes([size]) + fields


def test_as_many_tensors_as_are_taken_pass() -> None:
    asked = message("ModelInferRequest")()
    for number in range(MAX_TENSORS):
        asked.inputs.add(name=f"in {number}", datatype="FP32", shape=[1, 2, 3])
        asked.outputs.add(name=f"out {number}")
        for tensor in (asked.inputs[-1], asked.outputs[-1]):
            tensor.parameters["shared_memory_region"].string_param = "region"
            tensor.parameters["shared_memory_byte_size"].int64_param = 24
            tensor.parameters["shared_memory_offset"].int64_param = 24 * number
        asked.raw_input_contents.append(b"")
    check_fields(INFER, asked.SerializeToString())


def test_what_is_large_by_its_elements_passes() -> None:
    asked = message("ModelInferRequest")(raw_input_contents=[bytes(1 << 20)])
    asked.inputs.add(name="a", shape=[1 << 20]).contents.bool_contents.extend([True] * 100_000)
    asked.inputs.add(name="b").contents.bytes_contents.extend([b""] * 100_000)
    check_fields(INFER, asked.SerializeToString())


def test_others_have_no_tensors() -> None:
    other = METHODS["ModelReady"]
    check_fields(other, bytes(MOST_BYTES))
    with pytest.raises(RequestError, match="no tensors"):
        check_fields(other, bytes(MOST_BYTES + 1))


def test_nothing_hides_behind_a_group() -> None:
    with pytest.raises(RequestError) as refused:
        check_fields(INFER, b"\x0b\x0c" + b"\x2a\x00" * (MOST_FIELDS + 1))
    assert refused.value.code == "malformed"


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    with suppress(RequestError):
        assert _count(data) <= len(data)


@given(
    st.lists(st.text(max_size=3), max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.binary(max_size=300), max_size=5),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=5),
)
def test_each_field_is_counted_once(
    names: list[str], shape: list[int], raw: list[bytes], parameters: dict[str, float]
) -> None:
    asked = message("ModelInferRequest")(raw_input_contents=raw)
    for name in names:
        # A shape is one field, whatever its length.
        asked.inputs.add(name=name, shape=shape)
    for name, value in parameters.items():
        asked.parameters[name].double_param = value
    each = sum(1 + bool(name) + bool(shape) for name in names)
    entries = 3 * len(parameters)
    assert _count(asked.SerializeToString()) == each + len(raw) + entries
