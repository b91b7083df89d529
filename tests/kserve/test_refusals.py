"""Malformed requests are refused with a code before anything large is allocated."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nano_inference.config import RequestError
from nano_inference.kserve.codec import MAX_TENSORS, decode_http_request, encode_http_response
from nano_inference.kserve.grpc_codec import decode_infer_request, encode_infer_response
from nano_inference.kserve.protobuf import ModelInferRequest
from nano_inference.kserve.tensors import (
    MAX_STRINGS,
    InferResponse,
    NamedTensor,
    RequestedOutput,
    SharedMemory,
)

from ..errors import raises
from .drawn import TYPED, Memory

Recorded = str | int

SHAPES_OF_NOTHING = [
    *([-1], [2, -3], [-(2**63)], [2**62, 4], [2**31, 2**33, 0], [0, 2**62, 2**62]),
    *([2**63 - 1] * 5, [1] * 33, [3], [1], []),
]
"""Not one of them is the shape of two elements."""


def message(
    shape: list[int],
    raw: list[bytes],
    datatype: str = "FP32",
    name: str = "a",
    parameters: dict[str, Recorded] | None = None,
    **contents: list[Any],
) -> Any:
    """A request of one input."""
    made = ModelInferRequest(model_name="model", raw_input_contents=raw)
    described = made.inputs.add(name=name, datatype=datatype, shape=shape)
    for parameter, value in (parameters or {}).items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(described.parameters[parameter], kind, value)
    for field, values in contents.items():
        getattr(described.contents, field).extend(values)
    return made


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def one(**more: Any) -> dict[str, Any]:
    """An input of two numbers, but for what is given."""
    return {"name": "a", "shape": [2], "datatype": "INT8", "data": [1, 2], **more}


def in_memory(region: Any = "region", size: Any = 8, offset: Any = 0) -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }


def refused(read: Callable[[], object], most_bytes: int = 1 << 20) -> RequestError:
    """The error of something that is refused, before much memory is used for it."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert caught.value.message.isascii()
    return caught.value


TWO_ELEMENTS: dict[str, tuple[bytes, list[Any], list[Any]]] = {
    "FP32": (b"\0" * 8, [1.0, 2.0], [1.0, 2.0]),
    "BYTES": (b"\0" * 8, [b"", b""], ["", ""]),
    "BOOL": (b"\0\1", [True, False], [True, False]),
}
"""By datatype, as raw contents, as typed ones, and in JSON."""


@pytest.mark.parametrize("shape", SHAPES_OF_NOTHING)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_shape_and_elements_must_fit(shape: list[int], datatype: str) -> None:
    raw, elements, data = TWO_ELEMENTS[datatype]
    field = TYPED[datatype]
    memory = Memory()
    described = {"name": "a", "shape": shape, "datatype": datatype}
    binary = body({**described, "parameters": {"binary_data_size": len(raw)}})
    placed: dict[str, Any] = in_memory(size=len(raw))
    in_place = body({**described, "parameters": placed})
    ways: list[Callable[[], object]] = [
        lambda: decode_infer_request(message(shape, [raw], datatype)),
        lambda: decode_infer_request(message(shape, [], datatype, **{field: elements})),
        lambda: decode_http_request("m", "", body({**described, "data": data})),
        lambda: decode_http_request("m", "", body({**described, "data": [data]})),
        lambda: decode_http_request("m", "", binary + raw, len(binary)),
        lambda: decode_infer_request(message(shape, [], datatype, parameters=placed), memory),
        lambda: decode_http_request("m", "", in_place, None, memory),
    ]
    for read in ways:
        assert refused(read).code == "invalid_tensor"
    # Strings that are shorter than said are seen only when they are read.
    assert not memory.reads or datatype == "BYTES"


@pytest.mark.parametrize(
    ("raw", "shape", "said"),
    [
        (b"\1\0\0", [1], "at least 4"),
        (b"", [1], "at least 4"),
        (b"\0\0\0\0\0\0\0", [2], "at least 8"),
        (b"\1\0\0\0", [1], "ends within its element 0 of 1"),
        (b"\xff\xff\xff\xffabc", [1], "ends within its element 0 of 1"),
        (b"\2\0\0\0ab\1\0", [2], "ends within its element 1 of 2"),
        (b"\1\0\0\0a\0", [1], "1 bytes more than its 1 elements"),
        (bytes(4 * MAX_STRINGS + 4), [MAX_STRINGS + 1], "more than 1048576"),
    ],
)
def test_malformed_strings_are_refused(raw: bytes, shape: list[int], said: str) -> None:
    made = message(shape, [raw], "BYTES")
    # Protobuf hands out a copy of all that was sent.
    error = refused(lambda: decode_infer_request(made), len(raw) + (1 << 20))
    assert error.code == "invalid_tensor"
    assert said in error.message


@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_an_empty_tensor_with_huge_dimensions_is_refused(datatype: str) -> None:
    described = {"name": "a", "shape": [0, 2**62, 2**62], "datatype": datatype}
    binary = body({**described, "parameters": {"binary_data_size": 0}})
    ways: list[Callable[[], object]] = [
        lambda: decode_infer_request(message([0, 2**62, 2**62], [b""], datatype)),
        lambda: decode_infer_request(message([0, 2**62, 2**62], [], datatype)),
        lambda: decode_http_request("m", "", body({**described, "data": []})),
        lambda: decode_http_request("m", "", binary, len(binary)),
    ]
    for read in ways:
        assert "more than" in refused(read).message


@pytest.mark.parametrize(
    "made",
    [
        message([2], [b"\0" * 8], "FP31"),
        message([2], [b"\0" * 8], ""),
        message([2], [b"\0" * 8], name=""),
        message([2], [b"\0" * 8], name="a" * 257),
        message([2], [b"\0\2"], "BOOL"),
        message([2], [b"\0" * 8, b"\0" * 8]),
        message([2], [], "FP16", fp32_contents=[1.0, 2.0]),
        message([2], [], "BF16"),
        message([2], []),
        message([2], [], fp64_contents=[1.0, 2.0]),
        message([2], [], fp32_contents=[1.0, 2.0], int_contents=[1]),
        message([2], [], "INT8", int_contents=[1, 128]),
        message([2], [], "UINT16", uint_contents=[1, 65536]),
        message([2], [], parameters={"shared_memory_byte_size": 8}),
        message([2], [], parameters={"shared_memory_offset": 8}),
        message([2], [], parameters={"shared_memory_region": "region"}),
        message([2], [], parameters=in_memory(region="")),
        message([2], [], parameters=in_memory(region="r" * 257)),
        message([2], [], parameters=in_memory(region=1)),
        message([2], [], parameters=in_memory(size=-8)),
        message([2], [], parameters=in_memory(size="8")),
        message([2], [], parameters=in_memory(offset=-1)),
    ],
    ids=lambda made: str(made).replace("\n", " ")[:100],
)
def test_malformed_messages_are_refused(made: Any) -> None:
    memory = Memory()
    assert refused(lambda: decode_infer_request(made, memory)).code == "invalid_tensor"
    assert not memory.reads


def test_raw_contents_must_be_of_all_tensors() -> None:
    made = message([2], [b"\0" * 8])
    made.inputs.add(name="b", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    assert "1 raw contents for 2" in refused(lambda: decode_infer_request(made)).message


def test_too_many_tensors_are_refused() -> None:
    made = ModelInferRequest(model_name="model")
    for _ in range(MAX_TENSORS + 1):
        made.inputs.add(name="a", datatype="INT8", shape=[0])
    assert "1025 tensors" in refused(lambda: decode_infer_request(made)).message
    many = body(*[one()] * (MAX_TENSORS + 1))
    with pytest.raises(RequestError, match="1025 tensors"):
        decode_http_request("m", "", many)
    wanted = body(one(), outputs=[{"name": "b"}] * (MAX_TENSORS + 1))
    with pytest.raises(RequestError, match="1025 tensors"):
        decode_http_request("m", "", wanted)


def test_a_parameter_without_a_value_is_refused() -> None:
    made = message([2], [b"\0" * 8])
    made.parameters["sequence"].SetInParent()
    assert refused(lambda: decode_infer_request(made)).code == "invalid_request"


def test_shared_memory_without_any_is_refused() -> None:
    made = message([2], [], parameters=in_memory())
    assert "there is none here" in refused(lambda: decode_infer_request(made)).message
    placed = body(one(datatype="FP32", data=None, parameters=in_memory()))
    placed = placed.replace(b'"data": null, ', b"")
    assert "there is none here" in refused(lambda: decode_http_request("m", "", placed)).message


def test_classification_is_refused() -> None:
    made = message([2], [b"\0" * 8])
    made.outputs.add(name="b").parameters["classification"].int64_param = 3
    assert refused(lambda: decode_infer_request(made)).code == "unsupported"
    wanted = body(one(), outputs=[{"name": "b", "parameters": {"classification": 3}}])
    assert refused(lambda: decode_http_request("m", "", wanted)).code == "unsupported"


@pytest.mark.parametrize(
    ("given", "header", "code"),
    [
        (b"", None, "malformed"),
        (b"\xff", None, "malformed"),
        (b"[" * 100_000, None, "malformed"),
        (b'{"inputs": NaN', None, "malformed"),
        (b"[NaN," * 50_000, None, "malformed"),
        (body(one()).replace(b"1", b"1e400"), None, "malformed"),
        (body(one(data=[float("nan"), 7])).replace(b"7", b"1e400"), None, "malformed"),
        (body(one()).replace(b"1", b"9" * 5000), None, "malformed"),
        (b"[]", None, "invalid_request"),
        (b"{}", None, "invalid_request"),
        (body(one(shapes=[1])), None, "invalid_request"),
        (body(one(), output=[]), None, "invalid_request"),
        (body(one(), model_name="other"), None, "invalid_request"),
        (body(one(shape=[2.5])), None, "invalid_request"),
        (body(one(shape=[True])), None, "invalid_request"),
        (body(one(name=3)), None, "invalid_request"),
        (body(one(), parameters={"a": [1]}), None, "invalid_request"),
        (body(one(), parameters={"binary_data_output": 1}), None, "invalid_request"),
        (body(one(), outputs=[{"name": 3}]), None, "invalid_request"),
        (body(outputs=[{"name": "b", "parameters": {"binary_data": 1}}]), None, "invalid_request"),
        (body(one()), 0, "invalid_request"),
        (body(one()), -1, "invalid_request"),
        (body(one()), 1_000_000, "invalid_request"),
        (body(one(shape=[2**70])), None, "invalid_tensor"),
        (body(one(shape=[-(2**70)])), None, "invalid_tensor"),
        (body(one(datatype="int8")), None, "invalid_tensor"),
        (body(one(name="")), None, "invalid_tensor"),
        (body(one(data="ab")), None, "invalid_tensor"),
        (body(one(data=None)), None, "invalid_tensor"),
        (body(one(data=[1, [2]])), None, "invalid_tensor"),
        (body(one(data=[[1], [2]])), None, "invalid_tensor"),
        (body(one(data=[[1], 2])), None, "invalid_tensor"),
        (body(one(data=[1, 2.0])), None, "invalid_tensor"),
        (body(one(data=[1, True])), None, "invalid_tensor"),
        (body(one(data=[1, None])), None, "invalid_tensor"),
        (body(one(data=[1, "2"])), None, "invalid_tensor"),
        (body(one(data=[1, 128])), None, "invalid_tensor"),
        (body(one(data=[1, -129])), None, "invalid_tensor"),
        (body(one(data=[1, float("nan")])), None, "invalid_tensor"),
        (body(one(datatype="BOOL", data=[0, 2])), None, "invalid_tensor"),
        (body(one(datatype="UINT64", data=[1, 2**64])), None, "invalid_tensor"),
        (body(one(datatype="FP32", data=[1, 1e39])), None, "invalid_tensor"),
        (body(one(datatype="FP64", data=[1, 10**400])), None, "invalid_tensor"),
        (body(one(datatype="FP16", data=[1, 2])), None, "invalid_tensor"),
        (body(one(datatype="BYTES", data=["a", 2])), None, "invalid_tensor"),
        (body(one(parameters={"binary_data_size": 2})) + b"ab", None, "malformed"),
        (body(one(parameters={"binary_data_size": 2})), None, "invalid_tensor"),
        (body(one(parameters={"binary_data_size": -2})), None, "invalid_tensor"),
        (body(one(parameters={"binary_data_size": "2"})), None, "invalid_tensor"),
        (body(one(parameters=in_memory(size=2))), None, "invalid_tensor"),
        (body(one(parameters=in_memory(size=2.0))), None, "invalid_tensor"),
    ],
    ids=lambda given: repr(given)[:100],
)  # fmt: skip
def test_malformed_bodies_are_refused(given: bytes, header: int | None, code: str) -> None:
    with raises(code):
        decode_http_request("m", "", given, header, Memory())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        *(({"data": None, "parameters": {"binary_data_size": n}}, "") for n in (0, 1, 3, 2**70)),
        ({}, "2 bytes of binary data are left"),
        ({"parameters": {"binary_data_size": 2}}, "it has 2"),
    ],
)
def test_binary_data_must_fit_its_tensors(more: dict[str, Any], why: str) -> None:
    described = one(**more)
    if "data" in more:
        del described["data"]
    made = body(described)
    error = refused(lambda: decode_http_request("m", "", made + b"ab", len(made)))
    assert error.code == "invalid_tensor"
    assert why in error.message


def test_a_written_output_must_fit_its_place() -> None:
    memory = Memory()
    response = InferResponse(model_name="m", outputs=(NamedTensor("b", np.ones(2)),))
    wanted = [RequestedOutput("b", SharedMemory("region", 15))]
    for encode in (
        lambda: encode_infer_response(response, wanted, memory),
        lambda: encode_http_response(response, wanted, memory=memory),
    ):
        assert "16 bytes" in refused(encode).message
    assert not memory.data.any()


def test_an_unknown_region_is_refused() -> None:
    memory = Memory()
    response = InferResponse(model_name="m", outputs=(NamedTensor("b", np.ones(2)),))
    wanted = [RequestedOutput("b", SharedMemory("other", 16))]
    made = message([2], [], parameters=in_memory(region="other"))
    assert refused(lambda: decode_infer_request(made, memory)).code == "unknown_region"
    assert refused(lambda: encode_infer_response(response, wanted, memory)).code == "unknown_region"


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(1, dtype=np.complex64),
        np.array([b"a"]),
        np.array(["a"]),
        np.zeros(1, dtype="M8[s]"),
        np.array([1, None], dtype=np.object_),
        np.array(["\ud800"], dtype=np.object_),
    ],
    ids=lambda data: str(data.dtype),
)
def test_arrays_without_a_datatype_are_refused(data: Any) -> None:
    response = InferResponse(model_name="m", outputs=(NamedTensor("b", data),))
    assert refused(lambda: encode_infer_response(response)).code == "invalid_tensor"
    assert refused(lambda: encode_http_response(response, (), True)).code == "invalid_tensor"


@pytest.mark.parametrize(
    "data", [np.array([b"\xff"], dtype=np.object_), np.zeros(1, dtype=np.float16)]
)
def test_outputs_without_a_json_form_are_refused_with_advice(data: Any) -> None:
    response = InferResponse(model_name="m", outputs=(NamedTensor("b", data),))
    assert "binary_data" in refused(lambda: encode_http_response(response)).message
    assert encode_http_response(response, binary_outputs=True)[1] is not None
