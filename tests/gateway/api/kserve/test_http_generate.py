"""`generate` and `generate_stream`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

from nano_inference.config import RequestError
from nano_inference.gateway.api.kserve.http import generate_json, read_generate
from nano_inference.gateway.server.http import FieldError
from nano_inference.kserve.tensors import (
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    TensorError,
    TensorSpec,
)

from ...fake import data_of
from .calls import Several, asking, failed, listening

INPUTS = (
    TensorSpec("text_input", "BYTES", (1,)),
    TensorSpec("stream", "BOOL", (1,), True),
    TensorSpec("sampling_parameters", "BYTES", (1,), True),
    TensorSpec("input_ids", "INT64", (-1,), True),
    TensorSpec("rows", "FP32", (-1, -1), True),
    TensorSpec("scale", "FP64", (), True),
)
SPEC = ModelSpec(name="tiny", inputs=INPUTS, outputs=())


def taken(**fields: Any) -> tuple[dict[str, Any], InferRequest]:
    """The tensors that fields become, as lists; and the whole request."""
    asked = read_generate(SPEC, "1", fields)
    return {each.name: each.data.tolist() for each in asked.inputs}, asked


# --- fields -------------------------------------------------------------------------------------


def test_fields_that_are_inputs_are_tensors_and_others_are_parameters() -> None:
    tensors, asked = taken(
        text_input="zwölf",
        stream=False,
        parameters={"temperature": 0, "input_ids": [1, 2, 3], "seed": 7, "greedy": True},
        user="me",
    )
    assert tensors == {"text_input": ["zwölf".encode()], "stream": [False], "input_ids": [1, 2, 3]}
    assert asked.parameters == {"temperature": 0, "seed": 7, "greedy": True, "user": "me"}
    assert (asked.model_name, asked.model_version, asked.id) == ("tiny", "1", "")
    assert [each.datatype for each in asked.inputs] == ["BYTES", "BOOL", "INT64"]


def test_the_id_of_a_request() -> None:
    assert taken(text_input="a", id="mine")[1].id == "mine"


@pytest.mark.parametrize(
    ("name", "value", "shape"),
    [
        ("input_ids", 5, (1,)),
        ("input_ids", [5], (1,)),
        ("input_ids", [], (0,)),
        ("rows", 1, (1, 1)),
        ("rows", [1, 2], (1, 2)),
        ("rows", [[1, 2], [3, 4]], (2, 2)),
        ("rows", [[], []], (2, 0)),
        ("scale", 0.5, ()),
    ],
)
def test_elements_take_the_inputs_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    asked = taken(**{name: value})[1]
    assert asked.inputs[0].shape == shape


def test_an_object_becomes_the_text_of_its_json() -> None:
    tensors, _ = taken(sampling_parameters={"temperature": 0.5, "stop": ["a"]})
    (text,) = tensors["sampling_parameters"]
    assert json.loads(text) == {"temperature": 0.5, "stop": ["a"]}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"id": 7}, FieldError),
        ({"parameters": []}, FieldError),
        ({"parameters": None}, FieldError),
        ({"stream": True, "parameters": {"stream": False}}, FieldError),
        ({"stop": ["a"]}, FieldError),
        ({"parameters": {"stop": None}}, FieldError),
        ({"seed": 2**63}, FieldError),
        ({"text_input": 7}, TensorError),
        ({"text_input": None}, TensorError),
        ({"stream": "yes"}, TensorError),
        ({"input_ids": [0.5]}, TensorError),
        ({"input_ids": [2**63]}, TensorError),
        ({"input_ids": {"a": 1}}, TensorError),
        ({"rows": [[1, 2], [3]]}, TensorError),
        ({"rows": [[[1]], 2]}, TensorError),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_generate(SPEC, "", fields)


def test_deep_lists_are_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(TensorError):
        taken(rows=deep)


def test_one_element_is_itself_and_several_are_a_list() -> None:
    outputs = (
        NamedTensor("text_output", np.array([b"one"], dtype=np.object_)),
        NamedTensor("output_ids", np.array([[1, 2]], dtype=np.int64)),
        NamedTensor("none", np.array([], dtype=np.float32)),
    )
    response = InferResponse(model_name="tiny", id="mine", outputs=outputs)
    assert generate_json(response) == {
        "id": "mine",
        "model_name": "tiny",
        "model_version": "1",
        "text_output": "one",
        "output_ids": [1, 2],
        "none": [],
    }


# --- the endpoints ------------------------------------------------------------------------------


async def test_generate_answers_once() -> None:
    several = Several()
    async with asking(several) as http:
        answer = await http.post(
            "/v2/models/several/generate", json={"times": 3, "parameters": {"temperature": 0}}
        )
    assert answer.json() == {
        "model_name": "several",
        "model_version": "1",
        "number": 2,
        "word": "number 2",
    }
    assert not several.calls[0].many
    assert several.calls[0].request.parameters == {"temperature": 0}


async def test_generate_stream_has_an_event_for_each_answer() -> None:
    several = Several()
    async with asking(several) as http:
        answer = await http.post(
            "/v2/models/several/versions/1/generate_stream", json={"times": 3, "id": "mine"}
        )
    assert [(each["id"], each["number"], each["word"]) for each in data_of(answer)] == [
        ("mine", number, f"number {number}") for number in range(3)
    ]
    assert several.calls[0].many


async def test_an_event_is_sent_when_there_is_an_answer() -> None:
    several = Several()
    several.go_on = anyio.Event()
    path = "/v2/models/several/generate_stream"
    async with listening(several) as http, http.stream("POST", path, json={"times": 2}) as answer:
        lines: AsyncIterator[str] = answer.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["number"] == 0
        assert several.ended == []
        several.go_on.set()
        assert [json.loads(line[6:])["number"] async for line in lines if line] == [1]


@pytest.mark.parametrize("what", ["generate", "generate_stream"])
async def test_an_error_before_the_first_answer_is_a_status(what: str) -> None:
    async with asking(Several(failure=RequestError("no", code="overloaded"))) as http:
        path = f"/v2/models/several/{what}"
        assert failed(await http.post(path, json={"times": 0}), 429) == "overloaded"
        assert failed(await http.post(path, json={"parameters": 7}), 400) == "invalid_request"
        assert failed(await http.post(path, content=b"[]"), 400) == "malformed"


async def test_an_error_after_answers_is_the_last_event() -> None:
    async with asking(Several(failure=RequestError("no", code="lane_failed"))) as http:
        answer = await http.post("/v2/models/several/generate_stream", json={"times": 2})
    assert answer.status_code == 200
    *answers, last = data_of(answer)
    assert [each["number"] for each in answers] == [0, 1]
    assert last == {"error": "no"}
