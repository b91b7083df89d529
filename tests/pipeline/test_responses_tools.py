"""A whole pipeline calls functions, by a model that has never learned of any: by grammar alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from ..gateway.saying import calling_model
from . import short_model

LIMIT_S = 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "climate", "parameters": SCHEMA, "strict": True},
]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "How is it there?",
    "tools": TOOLS,
    "temperature": 0,
    "reasoning": {"effort": "none"},
}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = calling_model(folder, short_model.folder(), marks=False)
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S) as made,
    ):
        yield made


@pytest.mark.parametrize("named", ["", "climate"])
async def test_a_call_that_is_required_is_made(client: AsyncOpenAI, named: str) -> None:
    choice: Any = {"type": "function", "name": named} if named else "required"
    asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": False}
    async with asyncio.timeout(LIMIT_S):
        first = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        call = first.output[-1]
        assert call.type == "function_call"
        assert call.name in ([named] if named else ["weather", "climate"])
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert first.status == "completed"
        again = streamed.output[-1]
        assert again.type == "function_call"
        assert (again.name, again.arguments) == (call.name, call.arguments)
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
        second = await client.responses.create(
            **ASKED | {"input": [output], "tool_choice": "none", "max_output_tokens": 8},
            previous_response_id=first.id,
        )
        assert [item.type for item in second.output] == ["message"]


async def test_an_answer_in_a_form_or_calls(client: AsyncOpenAI) -> None:
    """Whichever the model writes, it is one of both."""
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    valid = 0
    async with asyncio.timeout(LIMIT_S):
        for seed in range(8):
            more = {"extra_body": {"seed": seed}}
            asked = ASKED | {"temperature": 1, "text": {"format": form}} | more
            answer = await client.responses.create(**asked)
            texts = [item.arguments for item in answer.output if item.type == "function_call"]
            texts += [answer.output_text] if answer.output_text else []
            for text in texts if answer.status == "completed" else []:
                jsonschema.validate(json.loads(text), SCHEMA)
                valid += 1
    assert valid
