"""Constraints through the whole pipeline, by every interface that has a name for them."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from nano_inference import Completion, Pipeline
from nano_inference.config import load_config

from .builders import error_code
from .conftest import LIMIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = Literal["Ana", "Ben"]


class Person(BaseModel):
    """A model of which openai-python makes a schema, and an object of the answer."""

    name: NAMES
    ages: list[int] = Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ana", "Ben"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUEST: dict[str, Any] = {"prompt": "Ana, 3, is a cat. JSON:", "n": 3}
SAMPLING: dict[str, Any] = {"max_tokens": 200, "seed": 3, "constraint": {"json_schema": SCHEMA}}


async def test_samples_meet_their_constraint_streamed_or_not(shared: Pipeline) -> None:
    texts: list[list[str]] = []
    for stream in (False, True):
        request = REQUEST | {"sampling": SAMPLING, "stream": stream}
        grown = ["", "", ""]
        async for output in shared.submit(request):
            if isinstance(output, Completion):
                assert output.status == "done", output.error
                samples = output.samples
            else:
                grown[output.sample_index] += output.text
        texts.append([sample.text for sample in samples])
        assert grown in (texts[-1], ["", "", ""])
        for sample in samples:
            assert sample.finish_reason == "stop"
            jsonschema.validate(json.loads(sample.text), SCHEMA)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "constraint",
    [{}, {"regex": "("}, {"json_schema": "{"}, {"lark": "start: start"}, {"regex": "a" * 70_000}],
)
async def test_an_unsatisfiable_constraint_ends_with_its_code(
    shared: Pipeline, constraint: dict[str, Any]
) -> None:
    request = REQUEST | {"sampling": {"constraint": constraint}}
    completion = await shared.complete(request)
    assert error_code(completion) == "invalid_constraint"
    free = await shared.complete(REQUEST | {"sampling": {"max_tokens": 2}})
    assert free.status == "done"


async def test_the_end_may_not_be_forbidden(shared: Pipeline) -> None:
    for more in ({"ignore_eos": True}, {"min_tokens": 2}):
        completion = await shared.complete(REQUEST | {"sampling": SAMPLING | more})
        assert error_code(completion) == "invalid_constraint"


async def test_openai_s_client_gets_an_object(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S) as client:
        chat = await client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "Who?"}],
            response_format=Person,
            max_tokens=200,
            seed=1,
        )
        assert chat.choices[0].message.parsed is not None
        assert isinstance(chat.choices[0].message.parsed, Person)
        response = await client.responses.parse(
            model="tiny",
            input="Who?",
            text_format=Person,
            max_output_tokens=200,
            # Many a sample thinks, or writes spaces and digits, until its tokens are used up.
            reasoning={"effort": "none"},
            extra_body={"seed": 1},
        )
        assert isinstance(response.output_parsed, Person)


BY_NAME: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "a choice": (
        "/v1/completions",
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"red", "blue"},
    ),
    "by vLLM's older name": ("/v1/completions", {"guided_regex": "x{3}"}, {"xxx"}),
    "llama.cpp's form": (
        "/v1/completions",
        {"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}},
        {"yes", "no"},
    ),
    "SGLang's": ("/generate", {"sampling_params": {"ebnf": 'root ::= "a" "b"'}}, {"ab"}),
}


# Not normalised, and with a format that is an annotation.
WRITTEN = "Cafe\u0301"
MARKED = f"<think>{WRITTEN}</think>"


def fields_with(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Calls of every interface that takes a schema: path and fields."""
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100}
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    parameters = {"type": "object", "properties": {"c": schema}, "required": ["c"]}
    tool = {"name": "f", "parameters": parameters | {"additionalProperties": False}}
    function = {"type": "function", "function": tool | {"strict": True}}
    anthropic = {"name": "f", "input_schema": tool["parameters"]}
    required = {"tool_choice": "required"}
    outputs = {"structured_outputs": {"json": schema}}
    return {
        "chat": ("/v1/chat/completions", chat | {"response_format": nested}),
        "chat's tools": ("/v1/chat/completions", chat | {"tools": [function]} | required),
        "completions": ("/v1/completions", {"prompt": "a", "response_format": nested}),
        "vLLM's": ("/v1/completions", {"prompt": "a"} | outputs),
        "responses": ("/v1/responses", {"input": "a", "text": {"format": flat}}),
        "responses' tools": (
            "/v1/responses",
            {"input": "a", "tools": [tool | {"type": "function", "strict": True}]} | required,
        ),
        "Anthropic's": ("/v1/messages", chat | {"output_config": {"format": flat}}),
        "Anthropic's tools": (
            "/v1/messages",
            chat | {"tools": [anthropic], "tool_choice": {"type": "any"}},
        ),
        "SGLang's": (
            "/generate",
            {"text": "a", "sampling_params": {"json_schema": json.dumps(schema)}},
        ),
        "KServe's": (
            "/v2/models/tiny/generate",
            {"text_input": "a", "sampling_parameters": outputs},
        ),
    }


@pytest.mark.parametrize("name", fields_with({}))
async def test_each_interface_keeps_a_schema_as_it_is_written(url: str, name: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        path, fields = fields_with({"const": WRITTEN, "format": "path"})[name]
        body = fields if path in ("/generate", "/v2/models/tiny/generate") else {"model": "tiny"}
        answer = await http.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        # As text within JSON, or as JSON within text within JSON.
        assert WRITTEN in json.dumps(answer.json(), ensure_ascii=False)
        _, fields = fields_with({"const": 2**53 + 1})[name]
        answer = await http.post(path, json=body | fields)
        assert answer.status_code == 400, answer.text
        assert "9007199254740993" in answer.text


async def test_each_interface_keeps_a_text_that_spells_a_token(shared: Pipeline, url: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": MARKED}}),
        ("/v1/completions", {"prompt": "a", "guided_choice": [MARKED]}),
        ("/generate", {"text": "a", "sampling_params": {"regex": MARKED}}),
        ("/generate", {"text": "a", "sampling_params": {"ebnf": f'root ::= "{MARKED}"'}}),
        (
            "/v2/models/tiny/generate",
            {"text_input": "a", "sampling_parameters": {"structured_outputs": {"regex": MARKED}}},
        ),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for path, body in calls:
            model = {"model": "tiny"} if path == "/v1/completions" else {}
            answer = await http.post(path, json=body | model)
            assert MARKED in json.dumps(answer.json(), ensure_ascii=False), answer.text
    completion = await shared.complete(
        REQUEST | {"sampling": {"constraint": {"choice": [MARKED]}, "max_tokens": 100}}
    )
    assert {(each.text, each.finish_reason) for each in completion.samples} == {(MARKED, "stop")}


async def test_a_deployment_may_ignore_keywords() -> None:
    overrides = {"engine.ignored_schema_keywords": ["uniqueItems"]}
    async with Pipeline(load_config(env={}, overrides=overrides)) as pipeline:
        schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}
        sampling = {"constraint": {"json_schema": schema}, "max_tokens": 100}
        completion = await pipeline.complete(REQUEST | {"sampling": sampling})
        assert completion.status == "done", completion.error
        texts = ["".join(sample.text.split()) for sample in completion.samples]
        assert all("[1,1".startswith(text[:4]) for text in texts)
        schema = schema | {"contains": {"const": 1}}
        refused = await pipeline.complete(
            REQUEST | {"sampling": {"constraint": {"json_schema": schema}}}
        )
        assert error_code(refused) == "invalid_constraint"
