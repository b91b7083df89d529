"""Bodies of HTTP: what Triton's client sends is what was meant, and it reads what is answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.http import InferInput, InferRequestedOutput, InferResult, _utils

from nano_inference.kserve.elements import byte_size, raw_bytes
from nano_inference.kserve.http_codec import (
    Parts,
    decode_http_request,
    decode_http_response,
    encode_http_request,
    encode_http_response,
)
from nano_inference.kserve.json_data import array_to_json, json_to_array
from nano_inference.kserve.tensors import (
    Datatype,
    InferResponse,
    NamedTensor,
    Parameters,
    RequestedOutput,
    SharedMemory,
    TensorError,
)

from .drawn import PARAMETERS, Memory, assert_equal, assert_same, elements, tensors

BINARY_ONLY: tuple[Datatype, ...] = ("FP16", "BF16")


def theirs(
    inputs: Sequence[NamedTensor],
    places: Sequence[SharedMemory | None],
    outputs: Sequence[RequestedOutput] | None = None,
    *,
    binary: bool = True,
    parameters: Parameters | None = None,
) -> tuple[bytes, int | None]:
    """The body that Triton's client makes, and its header."""
    made, wanted = [], []
    for tensor, place in zip(inputs, places, strict=True):
        described = InferInput(tensor.name, list(tensor.shape), tensor.datatype)
        if place is None:
            described.set_data_from_numpy(tensor.data, binary)
        else:
            described.set_shared_memory(*place)
        made.append(described)
    for output in outputs or ():
        wanted.append(InferRequestedOutput(output.name, output.binary))
        if output.memory is not None:
            wanted[-1].set_shared_memory(*output.memory)
    body, header = _utils._get_inference_request(
        made, "some id", wanted, 0, False, False, 0, None, parameters
    )
    return body, header


def body_of(parts: Parts) -> bytes:
    return b"".join(parts)


@given(tensors(), st.lists(st.booleans(), min_size=3, max_size=3), PARAMETERS)
def test_what_triton_sends_as_binary_data_is_what_was_meant(
    inputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    """Each input in the body or in shared memory, as it comes."""
    memory = Memory()
    places: list[SharedMemory | None] = []
    for place, (tensor, used) in enumerate(zip(inputs, shared, strict=False)):
        places.append(SharedMemory("region", byte_size(tensor), 4096 * place) if used else None)
        if (put := places[-1]) is not None:
            memory.write(put, raw_bytes(tensor))
    outputs = (
        RequestedOutput("a", SharedMemory("region", 8, 4)),
        RequestedOutput("b", binary=True),
        RequestedOutput("c"),
    )
    body, header = theirs(inputs, places, outputs, parameters=parameters)
    found = decode_http_request("model", "2", body, header, memory)
    assert_same(found.inputs, inputs)
    assert (found.model_name, found.model_version, found.id) == ("model", "2", "some id")
    assert found.outputs == outputs
    assert found.parameters == parameters
    assert not found.binary_outputs


@given(tensors(without=BINARY_ONLY, text=True))
def test_what_triton_sends_as_json_is_what_was_meant(inputs: tuple[NamedTensor, ...]) -> None:
    body, header = theirs(inputs, [None] * len(inputs), binary=False)
    found = decode_http_request("model", "", body, header)
    assert header is None
    assert_equal(found.inputs, inputs)
    assert found.outputs == ()
    assert found.binary_outputs
    assert found.parameters == {}


@given(tensors(), st.lists(st.booleans(), min_size=3, max_size=3), PARAMETERS)
def test_triton_reads_what_is_answered_as_binary_data(
    outputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    """Each output in the answer or in shared memory, as it was wanted."""
    memory = Memory()
    places = [
        SharedMemory("region", 4096, 4096 * place) if used else None
        for place, (_, used) in enumerate(zip(outputs, shared, strict=False))
    ]
    requested = [
        RequestedOutput(each.name, place, binary=True)
        for each, place in zip(outputs, places, strict=True)
    ]
    response = InferResponse(
        model_name="model", id="some id", outputs=outputs, parameters=parameters
    )
    parts, header = encode_http_response(response, requested, memory=memory)
    result = InferResult.from_response_body(body_of(parts), header_length=header)
    for each, place in zip(outputs, places, strict=True):
        described = result.get_output(each.name)
        assert described["shape"] == list(each.shape)
        assert described["datatype"] == each.datatype
        if place is None:
            assert elements(result.as_numpy(each.name)) == elements(each.data)
        else:
            told = described["parameters"]
            assert told.pop("shared_memory_region") == "region"
            assert told.pop("shared_memory_offset", 0) == place.offset
            assert told == {"shared_memory_byte_size": byte_size(each)}
            used = place._replace(byte_size=byte_size(each))
            assert memory.read(used).tobytes() == raw_bytes(each)
    assert result.get_response().get("parameters", {}) == parameters
    found = decode_http_response(body_of(parts), header, memory)
    assert_same(found.outputs, outputs)
    assert (found.model_name, found.model_version, found.id) == ("model", "1", "some id")
    assert found.parameters == parameters


@given(tensors(without=BINARY_ONLY, text=True))
def test_triton_reads_what_is_answered_as_json(outputs: tuple[NamedTensor, ...]) -> None:
    parts, header = encode_http_response(InferResponse(model_name="model", outputs=outputs))
    assert header is None
    result = InferResult.from_response_body(body_of(parts))
    for each in outputs:
        found = result.as_numpy(each.name)
        if each.datatype == "BYTES":
            assert [text.encode() for text in found.flat] == elements(each.data)
            assert found.shape == each.shape
        else:
            np.testing.assert_array_equal(found, each.data, strict=True)
    assert_equal(decode_http_response(body_of(parts)).outputs, outputs)


@given(tensors(without=BINARY_ONLY, text=True), st.booleans(), PARAMETERS)
def test_what_we_send_is_what_triton_sends(
    inputs: tuple[NamedTensor, ...], binary: bool, parameters: Parameters
) -> None:
    outputs = (RequestedOutput("b", binary=binary),)
    parts, header = encode_http_request(
        inputs,
        requested_outputs=outputs,
        id="some id",
        binary=binary,
        parameters=parameters,
    )
    body, their_header = theirs(
        inputs, [None] * len(inputs), outputs, binary=binary, parameters=parameters
    )
    ours, other = json.loads(body_of(parts)[:header]), json.loads(body[:their_header])
    # Triton's client says it only where it names no output.
    assert ours.get("parameters", {}).pop("binary_data_output", False) == binary
    np.testing.assert_equal(
        {"parameters": {}, **ours},
        {"parameters": {}, **other},
    )
    if header is not None:
        assert body_of(parts)[header:] == body[their_header:]
    assert_equal(decode_http_request("model", "", body_of(parts), header).inputs, inputs)


def test_a_body_without_outputs_named_may_want_all_as_binary_data() -> None:
    parts, header = encode_http_request([NamedTensor("a", np.zeros(1))])
    found = decode_http_request("model", "", body_of(parts), header)
    assert found.binary_outputs
    assert found.parameters == {}
    response = InferResponse(model_name="model", outputs=(NamedTensor("b", np.zeros(2)),))
    answer, answer_header = encode_http_response(response, found.outputs, found.binary_outputs)
    assert answer_header == len(answer[0])
    assert len(body_of(answer)) == answer_header + 16


def test_an_output_may_be_wanted_otherwise_than_the_others() -> None:
    body = {
        "inputs": [],
        "outputs": [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": True},
    }
    found = decode_http_request("model", "", json.dumps(body).encode())
    assert [each.binary for each in found.outputs] == [True, False]


@pytest.mark.parametrize("name", ["m", None])
def test_a_body_may_name_the_model(name: str | None) -> None:
    """As that of KServe's own client does."""
    body = {"id": "some id", "model_name": name, "inputs": [], "parameters": None}
    assert decode_http_request("m", "", json.dumps(body).encode()).id == "some id"


def test_binary_data_is_a_view_of_the_body() -> None:
    parts, header = encode_http_request([NamedTensor("a", np.arange(8))])
    body = body_of(parts)
    (found,) = decode_http_request("model", "", body, header).inputs
    assert np.shares_memory(found.data, np.frombuffer(body, dtype=np.uint8))


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("INT32", [2, 2], [1, 2, 3, 4], [[1, 2], [3, 4]]),
        ("INT32", [2, 2], [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("INT32", [1, 2, 1], [[[1], [2]]], [[[1], [2]]]),
        ("INT32", [2, 0], [[], []], [[], []]),
        ("INT32", [0, 2], [], []),
        ("INT32", [], [7], 7),
        ("BOOL", [3], [True, 0, 1], [True, False, True]),
        ("UINT64", [1], [2**64 - 1], [2**64 - 1]),
        ("INT64", [2], [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("FP32", [3], [1, -2.5, 2**70], [1.0, -2.5, float(2**70)]),
        ("FP64", [3], [float("inf"), float("-inf"), 1e308], [np.inf, -np.inf, 1e308]),
        ("BYTES", [1, 2], [["a", "\u00fc"]], [[b"a", "\u00fc".encode()]]),
    ],
)
def test_elements_as_json_has_them(
    datatype: Datatype, shape: list[int], data: Any, expected: Any
) -> None:
    body = {"inputs": [{"name": "a", "shape": shape, "datatype": datatype, "data": data}]}
    (found,) = decode_http_request("model", "", json.dumps(body).encode()).inputs
    assert found.data.tolist() == expected
    assert found.datatype == datatype
    assert found.shape == tuple(shape)
    flat = array_to_json("a", found.data)
    assert json_to_array("a", datatype, shape, flat).tolist() == expected


def test_what_json_has_no_form_for_is_refused_with_what_to_do() -> None:
    for data in (
        np.array([b"\xff"], dtype=np.object_),
        np.zeros(1, dtype=np.float16),
    ):
        response = InferResponse(model_name="model", outputs=(NamedTensor("a", data),))
        with pytest.raises(TensorError, match="binary_data"):
            encode_http_response(response)
        assert encode_http_response(response, binary_outputs=True)[1] is not None
