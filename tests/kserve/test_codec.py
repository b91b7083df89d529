"""Messages of gRPC: what Triton's client sends is what was meant, and it reads what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import (
    InferInput,
    InferRequestedOutput,
    InferResult,
    _utils,
    model_config_pb2,
    service_pb2,
)

from nano_inference.kserve.codec import (
    ModelIndex,
    decode_infer_request,
    decode_infer_response,
    encode_infer_request,
    encode_infer_request_shm,
    encode_infer_response,
    encode_model_config,
    encode_model_metadata,
    encode_repository_index,
)
from nano_inference.kserve.elements import byte_size, raw_bytes
from nano_inference.kserve.protobuf import ModelInferRequest, ModelInferResponse
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
)

from .drawn import PARAMETERS, Memory, arrays, assert_equal, assert_same, elements, tensors

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
SPEC = ModelSpec(
    name="model",
    inputs=(TensorSpec("text", "BYTES", (1,)), TensorSpec("flag", "BOOL", (1,), optional=True)),
    outputs=(TensorSpec("logprobs", "BF16", (-1, 2)),),
    versions=("1", "2"),
    decoupled=True,
)


def theirs(
    inputs: Sequence[NamedTensor],
    places: Sequence[SharedMemory | None],
    outputs: Sequence[RequestedOutput] = (),
    parameters: Parameters | None = None,
) -> Any:
    """The message that Triton's client makes."""
    made, wanted = [], []
    for tensor, place in zip(inputs, places, strict=True):
        described = InferInput(tensor.name, list(tensor.shape), tensor.datatype)
        if place is None:
            described.set_data_from_numpy(tensor.data)
        else:
            described.set_shared_memory(*place)
        made.append(described)
    for output in outputs:
        wanted.append(InferRequestedOutput(output.name))
        if output.memory is not None:
            wanted[-1].set_shared_memory(*output.memory)
    return _utils._get_inference_request(
        "model", made, "2", "some id", wanted, 0, False, False, 0, None, parameters
    )


def staged(memory: Memory, inputs: Sequence[NamedTensor]) -> list[SharedMemory]:
    """Puts tensors into memory, one behind the other, with a gap before each."""
    places, offset = [], 0
    for tensor in inputs:
        offset += 3
        places.append(SharedMemory("region", byte_size(tensor), offset))
        memory.write(places[-1], raw_bytes(tensor))
        offset += places[-1].byte_size
    return places


def decoded(message: Any, memory: Memory | None = None) -> InferRequest:
    """What comes of a message when it has gone over the wire."""
    return decode_infer_request(ModelInferRequest.FromString(message.SerializeToString()), memory)


@given(tensors(), st.lists(st.booleans(), min_size=3, max_size=3), PARAMETERS)
def test_what_triton_sends_is_what_was_meant(
    inputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    """Each input inline or in shared memory, as it comes."""
    memory = Memory()
    places = [
        place if used else None for place, used in zip(staged(memory, inputs), shared, strict=False)
    ]
    outputs = (RequestedOutput("a", SharedMemory("region", 8, 4)), RequestedOutput("b"))
    found = decoded(theirs(inputs, places, outputs, parameters), memory)
    assert_same(found.inputs, inputs)
    assert (found.model_name, found.model_version, found.id) == ("model", "2", "some id")
    assert found.outputs == outputs
    assert found.parameters == parameters


@given(tensors(), PARAMETERS)
def test_what_we_send_is_what_triton_sends(
    inputs: tuple[NamedTensor, ...], parameters: Parameters
) -> None:
    outputs = (RequestedOutput("a", SharedMemory("region", 8)), RequestedOutput("b"))
    made = encode_infer_request(
        "model",
        inputs,
        requested_outputs=outputs,
        id="some id",
        model_version="2",
        parameters=parameters,
    )
    assert service_pb2.ModelInferRequest.FromString(made.SerializeToString()) == theirs(
        inputs, [None] * len(inputs), outputs, parameters
    )
    assert_same(decoded(made).inputs, inputs)


@given(tensors())
def test_all_inputs_in_shared_memory(inputs: tuple[NamedTensor, ...]) -> None:
    memory = Memory()
    places = staged(memory, inputs)
    offsets = [place.offset for place in places]
    made = encode_infer_request_shm(
        "model",
        inputs,
        "region",
        offsets,
        requested_outputs=["b"],
        id="some id",
        model_version="2",
    )
    assert service_pb2.ModelInferRequest.FromString(made.SerializeToString()) == theirs(
        inputs, places, [RequestedOutput("b")]
    )
    assert not made.raw_input_contents
    assert_same(decoded(made, memory).inputs, inputs)
    with pytest.raises(ValueError, match="zip"):
        encode_infer_request_shm("model", inputs, "region", [*offsets, 0])


@given(st.data(), st.sampled_from([each for each in DATATYPES if each in CONTENTS]))
def test_typed_contents(data: st.DataObject, datatype: Datatype) -> None:
    array = data.draw(arrays(datatype))
    made = ModelInferRequest(model_name="model")
    described = made.inputs.add(name="a", datatype=datatype, shape=array.shape)
    getattr(described.contents, CONTENTS[datatype]).extend(array.reshape(-1).tolist())
    assert_equal(decoded(made).inputs, (NamedTensor("a", array),))


def test_shared_memory_goes_first_then_raw_then_typed() -> None:
    memory = Memory()
    memory.data[0] = 1
    made = ModelInferRequest(model_name="model")
    for name in ("shared", "raw"):
        described = made.inputs.add(name=name, datatype="UINT8", shape=[1])
        described.contents.uint_contents.append(3)
    made.inputs[0].parameters["shared_memory_region"].string_param = "region"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 1
    assert [each.data[0] for each in decoded(made, memory).inputs] == [1, 3]
    for raw in ([b"\2"], [b"\4", b"\2"]):
        made.raw_input_contents[:] = raw
        assert [each.data[0] for each in decoded(made, memory).inputs] == [1, 2]


@given(tensors(), st.lists(st.booleans(), min_size=3, max_size=3), PARAMETERS)
def test_triton_reads_what_is_answered(
    outputs: tuple[NamedTensor, ...], shared: list[bool], parameters: Parameters
) -> None:
    """Each output in the answer or in shared memory, as it was wanted."""
    memory = Memory()
    places = dict(zip((each.name for each in outputs), shared, strict=False))
    requested = [
        RequestedOutput(name, SharedMemory("region", 4096, 4096 * place) if used else None)
        for place, (name, used) in enumerate(places.items())
    ]
    response = InferResponse(
        model_name="model", id="some id", outputs=outputs, parameters=parameters
    )
    made = encode_infer_response(response, requested, memory)
    result = InferResult(service_pb2.ModelInferResponse.FromString(made.SerializeToString()))
    for each in outputs:
        described = result.get_output(each.name)
        if places[each.name]:
            used = memory_of(described)
            assert used.offset % 4096 == 0
            assert used.byte_size == byte_size(each)
            assert memory.read(used).tobytes() == raw_bytes(each)
        else:
            assert elements(result.as_numpy(each.name)) == elements(each.data)
            assert tuple(described.shape) == each.shape
            assert described.datatype == each.datatype
    assert list(made.raw_output_contents) == [
        raw_bytes(each) for each in outputs if not places[each.name]
    ]
    found = decode_infer_response(ModelInferResponse.FromString(made.SerializeToString()), memory)
    assert_same(tuple(sorted(found.outputs)), outputs)
    assert found.parameters == parameters
    assert (found.model_name, found.model_version, found.id) == ("model", "1", "some id")


def memory_of(described: Any) -> SharedMemory:
    """Where an output is, as any client reads it."""
    parameters = described.parameters
    return SharedMemory(
        parameters["shared_memory_region"].string_param,
        parameters["shared_memory_byte_size"].int64_param,
        parameters["shared_memory_offset"].int64_param,
    )


def test_a_server_may_send_empty_contents_for_what_is_in_shared_memory() -> None:
    """Triton does."""
    memory = Memory()
    memory.data[:2] = 5, 6
    made = ModelInferResponse(model_name="model")
    shared = made.outputs.add(name="shared", datatype="UINT8", shape=[2])
    shared.parameters["shared_memory_region"].string_param = "region"
    shared.parameters["shared_memory_byte_size"].int64_param = 2
    made.outputs.add(name="inline", datatype="UINT8", shape=[1])
    made.raw_output_contents.extend([b"", b"\7"])
    found = decode_infer_response(made, memory)
    assert [each.data.tolist() for each in found.outputs] == [[5, 6], [7]]
    with pytest.raises(TensorError, match="shared memory"):
        decode_infer_response(made)


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
def test_arrays_that_lie_in_memory_otherwise(data: Any) -> None:
    message = encode_infer_request("model", [NamedTensor("a", data)])
    (found,) = decoded(message).inputs
    encoded = [
        each.encode() if isinstance(each, str) else each for each in data.reshape(-1).tolist()
    ]
    assert found.data.reshape(-1).tolist() == encoded
    assert found.shape == data.shape
    assert found.data.dtype == DTYPES[found.datatype]


def test_a_tensor_in_shared_memory_is_a_view() -> None:
    memory = Memory()
    (place,) = staged(memory, [NamedTensor("a", np.arange(8, dtype=np.int64))])
    request = encode_infer_request_shm(
        "model", [NamedTensor("a", np.arange(8))], "region", [place.offset]
    )
    (found,) = decode_infer_request(request, memory).inputs
    assert np.shares_memory(found.data, memory.data)


def test_an_unsigned_number_of_64_bits_is_a_parameter() -> None:
    made = encode_infer_request("model", [], parameters={"priority": 2**64 - 1})
    assert made.parameters["priority"].uint64_param == 2**64 - 1
    assert decoded(made).parameters == {"priority": 2**64 - 1}
    with pytest.raises(TensorError, match="64 bits"):
        encode_infer_request("model", [], parameters={"priority": 2**64})


def test_metadata() -> None:
    made = encode_model_metadata(SPEC)
    assert service_pb2.ModelMetadataResponse.FromString(
        made.SerializeToString()
    ) == service_pb2.ModelMetadataResponse(
        name="model",
        versions=["1", "2"],
        platform="nano_inference",
        inputs=[
            {"name": "text", "datatype": "BYTES", "shape": [1]},
            {"name": "flag", "datatype": "BOOL", "shape": [1]},
        ],
        outputs=[{"name": "logprobs", "datatype": "BF16", "shape": [-1, 2]}],
    )


def test_config() -> None:
    made = encode_model_config(SPEC)
    found = service_pb2.ModelConfigResponse.FromString(made.SerializeToString()).config
    assert found == model_config_pb2.ModelConfig(
        name="model",
        platform="nano_inference",
        backend="nano_inference",
        input=[
            {"name": "text", "data_type": model_config_pb2.TYPE_STRING, "dims": [1]},
            {
                "name": "flag",
                "data_type": model_config_pb2.TYPE_BOOL,
                "dims": [1],
                "optional": True,
            },
        ],
        output=[{"name": "logprobs", "data_type": model_config_pb2.TYPE_BF16, "dims": [-1, 2]}],
        model_transaction_policy={"decoupled": True},
    )


@pytest.mark.parametrize("datatype", DATATYPES)
def test_each_datatype_is_in_the_config(datatype: Datatype) -> None:
    spec = ModelSpec(name="model", inputs=(TensorSpec("a", datatype, (1,)),), outputs=())
    (found,) = encode_model_config(spec).config.input
    named = model_config_pb2.DataType.Name(found.data_type)
    assert named == ("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")


def test_index() -> None:
    def told(made: Any) -> list[tuple[str, str, str, str]]:
        return [(each.name, each.version, each.state, each.reason) for each in made.models]

    names = encode_repository_index(["a", "b"])
    assert told(names) == [("a", "1", "READY", ""), ("b", "1", "READY", "")]
    pairs = {"a": True, "b": False}
    expected = [("a", "1", "READY", ""), ("b", "1", "UNAVAILABLE", "")]
    assert told(encode_repository_index(pairs)) == expected
    assert told(encode_repository_index(list(pairs.items()))) == expected
    full = encode_repository_index([ModelIndex("a", False, "3", "no lane works")])
    assert told(full) == [("a", "3", "UNAVAILABLE", "no lane works")]
