"""Tools over Anthropic's Messages and OpenAI's Responses, with their own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI

from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from ..gateway.saying import calling_model
from . import short_model
from .conftest import LIMIT_S

# --- Messages --------------------------------------------------------------------------------


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "input_schema": SCHEMA},
    {"name": "climate", "input_schema": SCHEMA},
]
# As Qwen's do it.
NO_THINKING = """
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
USER: Any = {"role": "user", "content": "How is it there?"}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncAnthropic]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = calling_model(folder, short_model.folder(), marks=False)
    with (folder / "chat_template.jinja").open("a") as template:
        template.write(NO_THINKING)
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        AsyncAnthropic(base_url=gateway.url, api_key="none", timeout=LIMIT_S) as made,
    ):
        yield made


async def both(client: AsyncAnthropic, **fields: Any) -> tuple[Message, Message]:
    """The same message, whole and put together of a stream."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": [USER],
        "tools": TOOLS,
        "thinking": {"type": "disabled"},
        "extra_body": {"temperature": 0},
        **fields,
    }
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return whole, await stream.get_final_message()


def without_ids(message: Message) -> list[dict[str, Any]]:
    """Its blocks; the ids of calls are made of the message's."""
    return [block.model_dump(exclude={"id"}) for block in message.content]


@pytest.mark.parametrize("named", ["", "climate"])
async def test_a_call_that_has_to_be_is_made(client: AsyncAnthropic, named: str) -> None:
    choice = {"type": "tool", "name": named} if named else {"type": "any"}
    choice |= {"disable_parallel_tool_use": True}
    async with asyncio.timeout(LIMIT_S):
        message, streamed = await both(client, tool_choice=choice)
    assert without_ids(message) == without_ids(streamed)
    assert message.stop_reason == streamed.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name in ([named] if named else ["weather", "climate"])
    jsonschema.validate(call.input, SCHEMA)


async def test_a_result_is_handed_back(client: AsyncAnthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "cold"}
    history = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with asyncio.timeout(LIMIT_S):
        message, streamed = await both(
            client, messages=history, tool_choice={"type": "none"}, max_tokens=8
        )
    assert without_ids(message) == without_ids(streamed)
    assert all(block.type != "tool_use" for block in message.content)


# --- Responses -------------------------------------------------------------------------------


FUNCTIONS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "climate", "parameters": SCHEMA, "strict": True},
]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "How is it there?",
    "tools": FUNCTIONS,
    "temperature": 0,
    "reasoning": {"effort": "none"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = calling_model(folder, short_model.folder(), marks=False)
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S) as made,
    ):
        yield made


@pytest.mark.parametrize("named", ["", "climate"])
async def test_a_call_that_is_required_is_made(openai_client: AsyncOpenAI, named: str) -> None:
    choice: Any = {"type": "function", "name": named} if named else "required"
    asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": False}
    async with asyncio.timeout(LIMIT_S):
        first = await openai_client.responses.create(**asked)
        async with openai_client.responses.stream(**asked) as stream:
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
        second = await openai_client.responses.create(
            **ASKED | {"input": [output], "tool_choice": "none", "max_output_tokens": 8},
            previous_response_id=first.id,
        )
        assert [item.type for item in second.output] == ["message"]


async def test_an_answer_in_a_form_or_calls(openai_client: AsyncOpenAI) -> None:
    """Whichever the model writes, it is one of both."""
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    valid = 0
    async with asyncio.timeout(LIMIT_S):
        for seed in range(8):
            more = {"extra_body": {"seed": seed}}
            asked = ASKED | {"temperature": 1, "text": {"format": form}} | more
            answer = await openai_client.responses.create(**asked)
            texts = [item.arguments for item in answer.output if item.type == "function_call"]
            texts += [answer.output_text] if answer.output_text else []
            for text in texts if answer.status == "completed" else []:
                jsonschema.validate(json.loads(text), SCHEMA)
                valid += 1
    assert valid
