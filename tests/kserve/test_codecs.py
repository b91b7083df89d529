"""The codecs read what Triton's client sends, and Triton's client reads what they write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from nano_inference.kserve.codec import (
    array_to_json,
    decode_http_request,
    encode_http_response,
    json_to_array,
    model_config,
    model_metadata,
)
from nano_inference.kserve.grpc_codec import (
    decode_infer_request,
    decode_infer_response,
    encode_infer_request,
    encode_infer_response,
)
from nano_inference.kserve.protobuf import ModelInferRequest, ModelInferResponse, message
from nano_inference.kserve.tensors import (
    DATATYPES,
    DTYPES,
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
    byte_size,
    raw_bytes,
)

from .drawn import PARAMETERS, TYPED, Memory, arrays, assert_equal, assert_same, elements, tensors

BINARY_ONLY: tuple[Datatype, ...] = ("FP16", "BF16")
SHARED = st.lists(st.booleans(), min_size=3, max_size=3)
"""Of each drawn tensor, whether it is in shared memory."""


class Grpc:
    """Messages of gRPC, by Triton's client and by ours."""

    kind = tritonclient.grpc

    @staticmethod
    def request(
        inputs: Sequence[Any], outputs: Sequence[Any], parameters: Parameters | None
    ) -> Any:
        return tritonclient.grpc._utils._get_inference_request(
            "model", inputs, "2", "some id", outputs, 0, False, False, 0, None, parameters
        )

    @staticmethod
    def decode(sent: Any, memory: Memory | None = None) -> InferRequest:
        received = ModelInferRequest.FromString(sent.SerializeToString())
        return decode_infer_request(received, memory)

    @staticmethod
    def respond(
        response: InferResponse, requested: Sequence[RequestedOutput], memory: Memory
    ) -> Any:
        """Triton's result. Our client reads the same response."""
        sent = encode_infer_response(response, requested, memory).SerializeToString()
        found = decode_infer_response(ModelInferResponse.FromString(sent), memory)
        assert_same(tuple(sorted(found.outputs)), response.outputs)
        assert msgspec.structs.replace(found, outputs=response.outputs) == response
        result = tritonclient.grpc.InferResult(service_pb2.ModelInferResponse.FromString(sent))
        assert result.get_response().id == "some id"
        return result

    @staticmethod
    def place_of(described: Any) -> SharedMemory:
        found = described.parameters
        return SharedMemory(
            found["shared_memory_region"].string_param,
            found["shared_memory_byte_size"].int64_param,
            found["shared_memory_offset"].int64_param,
        )


class Http:
    """The same of bodies of HTTP."""

    kind = tritonclient.http

    @staticmethod
    def request(
        inputs: Sequence[Any], outputs: Sequence[Any], parameters: Parameters | None
    ) -> Any:
        return tritonclient.http._utils._get_inference_request(
            inputs, "some id", outputs, 0, False, False, 0, None, parameters
        )

    @staticmethod
    def decode(sent: Any, memory: Memory | None = None) -> InferRequest:
        body, header = sent
        return decode_http_request("model", "2", body, header, memory)

    @staticmethod
    def respond(
        response: InferResponse, requested: Sequence[RequestedOutput], memory: Memory
    ) -> Any:
        parts, header = encode_http_response(response, requested, memory=memory)
        body = b"".join(parts)
        result = tritonclient.http.InferResult.from_response_body(body, header_length=header)
        expected: dict[str, Any] = {
            **{"model_name": "model", "model_version": "1", "id": "some id"},
            "outputs": [],
        }
        if response.parameters:
            # An infinite number is null in JSON.
            text = msgspec.json.encode(response.parameters)
            expected["parameters"] = msgspec.json.decode(text)
        assert result.get_response() | {"outputs": []} == expected
        return result

    @staticmethod
    def place_of(described: Any) -> SharedMemory:
        found = described["parameters"]
        return SharedMemory(
            found["shared_memory_region"],
            found["shared_memory_byte_size"],
            found.get("shared_memory_offset", 0),
        )


WIRES = pytest.mark.parametrize("wire", [Grpc, Http])
Wire = type[Grpc] | type[Http]


def sent_by_triton(
    wire: Wire,
    inputs: Sequence[NamedTensor],
    places: Sequence[SharedMemory | None] | None = None,
    outputs: Sequence[RequestedOutput] = (),
    parameters: Parameters | None = None,
    **how: bool,
) -> Any:
    """The request that Triton's client makes; over HTTP `how` is `binary_data`."""
    made, wanted = [], []
    for tensor, place in zip(inputs, places or [None] * len(inputs), strict=True):
        described = wire.kind.InferInput(tensor.name, list(tensor.shape), tensor.datatype)
        if place is None:
            described.set_data_from_numpy(tensor.data, **how)
        else:
            described.set_shared_memory(*place)
        made.append(described)
    for output in outputs:
        binary = {"binary_data": output.binary} if wire is Http else {}
        wanted.append(wire.kind.InferRequestedOutput(output.name, **binary))
        if output.memory is not None:
            wanted[-1].set_shared_memory(*output.memory)
    return wire.request(made, wanted, parameters)


def staged(memory: Memory, inputs: Sequence[NamedTensor]) -> list[SharedMemory]:
    """Puts tensors into memory, one behind the other, with a gap before each."""
    places, offset = [], 0
    for tensor in inputs:
        offset += 3
        places.append(SharedMemory("region", byte_size(tensor), offset))
        memory.write(places[-1], raw_bytes(tensor))
        offset += places[-1].byte_size
    return places


@WIRES
@given(tensors(), SHARED, PARAMETERS)
def test_a_request_of_triton_is_decoded(
    wire: Wire, inputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    memory = Memory()
    places = [
        place if used else None for place, used in zip(staged(memory, inputs), shared, strict=False)
    ]
    outputs = (
        RequestedOutput("a", SharedMemory("region", 8, 4)),
        RequestedOutput("b", binary=wire is Http),
        RequestedOutput("c"),
    )
    found = wire.decode(sent_by_triton(wire, inputs, places, outputs, parameters), memory)
    assert_same(found.inputs, inputs)
    assert (found.model_name, found.model_version, found.id) == ("model", "2", "some id")
    assert found.outputs == outputs
    assert found.parameters == parameters
    assert not found.binary_outputs


@WIRES
@given(tensors(), SHARED, PARAMETERS)
def test_triton_reads_a_response(
    wire: Wire, outputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    memory = Memory()
    places = [
        SharedMemory("region", 4096, 4096 * index) if used else None
        for index, (_, used) in enumerate(zip(outputs, shared, strict=False))
    ]
    requested = [
        RequestedOutput(each.name, place, binary=True)
        for each, place in zip(outputs, places, strict=True)
    ]
    response = InferResponse(
        model_name="model", id="some id", outputs=outputs, parameters=parameters
    )
    result = wire.respond(response, requested, memory)
    for each, place in zip(outputs, places, strict=True):
        if place is not None:
            used = wire.place_of(result.get_output(each.name))
            assert used == place._replace(byte_size=byte_size(each))
            assert memory.read(used).tobytes() == raw_bytes(each)
            continue
        assert elements(result.as_numpy(each.name)) == elements(each.data)
        described = result.get_output(each.name)
        if wire is Grpc:
            described = {"shape": described.shape, "datatype": described.datatype}
        assert tuple(described["shape"]) == each.shape
        assert described["datatype"] == each.datatype


# --- gRPC -----------------------------------------------------------------------------------------


@given(tensors(), st.booleans(), PARAMETERS)
def test_a_request_is_encoded_as_by_triton(
    inputs: tuple[NamedTensor, ...], shared: bool, parameters: Parameters
) -> None:
    """With all inputs in the message, or all in shared memory."""
    memory = Memory()
    places = staged(memory, inputs) if shared else None
    outputs = (RequestedOutput("a", SharedMemory("region", 8)), RequestedOutput("b"))
    request = InferRequest(
        model_name="model",
        model_version="2",
        id="some id",
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
    )
    made = encode_infer_request(request, places)
    assert service_pb2.ModelInferRequest.FromString(made.SerializeToString()) == sent_by_triton(
        Grpc, inputs, places, outputs, parameters
    )
    assert_same(Grpc.decode(made, memory).inputs, inputs)
    with pytest.raises(ValueError, match="zip"):
        encode_infer_request(request, [*(places or ()), *[SharedMemory("region", 1)] * 4])


@given(st.data(), st.sampled_from([each for each in DATATYPES if each in TYPED]))
def test_typed_contents(data: st.DataObject, datatype: Datatype) -> None:
    array = data.draw(arrays(datatype))
    made = ModelInferRequest(model_name="model")
    described = made.inputs.add(name="a", datatype=datatype, shape=array.shape)
    getattr(described.contents, TYPED[datatype]).extend(array.reshape(-1).tolist())
    assert_equal(Grpc.decode(made).inputs, (NamedTensor("a", array),))


def test_shared_memory_goes_first_then_raw_then_typed() -> None:
    memory = Memory()
    memory.data[0] = 1
    made = ModelInferRequest(model_name="model")
    for name in ("shared", "raw"):
        described = made.inputs.add(name=name, datatype="UINT8", shape=[1])
        described.contents.uint_contents.append(3)
    made.inputs[0].parameters["shared_memory_region"].string_param = "region"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 1
    assert [each.data[0] for each in Grpc.decode(made, memory).inputs] == [1, 3]
    # Triton's server sends raw contents for tensors in shared memory too, its client doesn't.
    for raw in ([b"\2"], [b"\4", b"\2"]):
        made.raw_input_contents[:] = raw
        assert [each.data[0] for each in Grpc.decode(made, memory).inputs] == [1, 2]


def test_an_unsigned_number_of_64_bits_is_a_parameter() -> None:
    made = encode_infer_request(InferRequest(model_name="m", parameters={"priority": 2**64 - 1}))
    assert made.parameters["priority"].uint64_param == 2**64 - 1
    assert Grpc.decode(made).parameters == {"priority": 2**64 - 1}
    with pytest.raises(TensorError, match="64 bits"):
        encode_infer_request(InferRequest(model_name="m", parameters={"priority": 2**64}))


@pytest.mark.parametrize(
    "data",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=np.float64).reshape(2, 3).T,
        np.arange(12)[::2],
        np.array([["a", b"b"], [b"", "\u00fc"]], dtype=np.object_).T,
    ],
    ids=["big endian", "transposed", "with gaps", "text"],
)
def test_arrays_of_any_layout_are_encoded(data: Any) -> None:
    request = InferRequest(model_name="m", inputs=(NamedTensor("a", data),))
    (found,) = Grpc.decode(encode_infer_request(request)).inputs
    encoded = [
        each.encode() if isinstance(each, str) else each for each in data.reshape(-1).tolist()
    ]
    assert found.data.reshape(-1).tolist() == encoded
    assert found.shape == data.shape
    assert found.data.dtype == DTYPES[found.datatype]


# --- HTTP -----------------------------------------------------------------------------------------


def decoded(body: object) -> InferRequest:
    return decode_http_request("model", "", json.dumps(body).encode())


@given(tensors(without=BINARY_ONLY, text=True))
def test_json_elements_go_both_ways(inputs: tuple[NamedTensor, ...]) -> None:
    body, header = sent_by_triton(Http, inputs, binary_data=False)
    assert header is None
    found = Http.decode((body, header))
    assert_equal(found.inputs, inputs)
    assert (found.outputs, found.binary_outputs, found.parameters) == ((), True, {})
    parts, header = encode_http_response(InferResponse(model_name="model", outputs=inputs))
    assert header is None
    result = tritonclient.http.InferResult.from_response_body(b"".join(parts))
    for each in inputs:
        made = result.as_numpy(each.name)
        if each.datatype == "BYTES":
            assert [text.encode() for text in made.flat] == elements(each.data)
            assert made.shape == each.shape
        else:
            np.testing.assert_array_equal(made, each.data, strict=True)


def test_unnamed_outputs_may_be_binary_and_named_ones_may_differ() -> None:
    head: dict[str, Any] = {"inputs": [], "parameters": {"binary_data_output": True}}
    found = decoded(head)
    assert found.binary_outputs
    assert found.parameters == {}
    response = InferResponse(model_name="model", outputs=(NamedTensor("b", np.zeros(2)),))
    answer, header = encode_http_response(response, found.outputs, found.binary_outputs)
    assert header == len(answer[0])
    assert len(b"".join(answer)) == header + 16
    head["outputs"] = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    assert [each.binary for each in decoded(head).outputs] == [True, False]


@pytest.mark.parametrize("name", ["model", None])
def test_a_body_may_name_the_model(name: str | None) -> None:
    """As that of KServe's own client does."""
    body = {"id": "some id", "model_name": name, "inputs": [], "parameters": None}
    assert decoded(body).id == "some id"


@WIRES
def test_a_decoded_tensor_is_a_view(wire: Wire) -> None:
    """Of the body, or of what was read from shared memory."""
    memory, tensor = Memory(), NamedTensor("a", np.arange(8))
    body, header = sent_by_triton(Http, [tensor])
    (found,) = decode_http_request("model", "", body, header).inputs
    assert np.shares_memory(found.data, np.frombuffer(body, dtype=np.uint8))
    shared = sent_by_triton(wire, [tensor], staged(memory, [tensor]))
    (found,) = wire.decode(shared, memory).inputs
    assert np.shares_memory(found.data, memory.data)


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
def test_elements_in_json(datatype: Datatype, shape: list[int], data: Any, expected: Any) -> None:
    body = {"inputs": [{"name": "a", "shape": shape, "datatype": datatype, "data": data}]}
    (found,) = decoded(body).inputs
    assert found.data.tolist() == expected
    assert found.datatype == datatype
    assert found.shape == tuple(shape)
    assert json_to_array("a", datatype, shape, array_to_json(found)).tolist() == expected


# --- models ---------------------------------------------------------------------------------------


def test_metadata_and_config_are_tritons_messages() -> None:
    spec = ModelSpec(
        name="model",
        inputs=(TensorSpec("text", "BYTES", (1,)), TensorSpec("flag", "BOOL", (1,), optional=True)),
        outputs=(TensorSpec("logprobs", "BF16", (-1, 2)),),
        versions=("1", "2"),
        decoupled=True,
    )
    metadata = message("ModelMetadataResponse")(**model_metadata(spec)).SerializeToString()
    theirs = service_pb2.ModelMetadataResponse.FromString(metadata)
    assert theirs == service_pb2.ModelMetadataResponse(
        name="model",
        versions=["1", "2"],
        platform="nano_inference",
        inputs=[
            {"name": "text", "datatype": "BYTES", "shape": [1]},
            {"name": "flag", "datatype": "BOOL", "shape": [1]},
        ],
        outputs=[{"name": "logprobs", "datatype": "BF16", "shape": [-1, 2]}],
    )
    config = message("ModelConfigResponse")(config=model_config(spec)).SerializeToString()
    theirs = service_pb2.ModelConfigResponse.FromString(config).config
    assert theirs == model_config_pb2.ModelConfig(
        name="model",
        platform="nano_inference",
        backend="nano_inference",
        input=[
            {"name": "text", "data_type": "TYPE_STRING", "dims": [1]},
            {"name": "flag", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
        ],
        output=[{"name": "logprobs", "data_type": "TYPE_BF16", "dims": [-1, 2]}],
        model_transaction_policy={"decoupled": True},
    )


@pytest.mark.parametrize("datatype", DATATYPES)
def test_each_datatype_is_in_the_config(datatype: Datatype) -> None:
    spec = ModelSpec(name="model", inputs=(TensorSpec("a", datatype, (1,)),), outputs=())
    (found,) = model_config(spec)["input"]
    assert found["data_type"] in dict(model_config_pb2.DataType.items())
    assert found["data_type"] == ("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
