"""Tools through the whole pipeline, by three interfaces: enforced formats hold for any model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import Message
from openai import AsyncOpenAI
from pydantic import BaseModel

from nano_inference import Gateway, Pipeline, load_config

from ..gateway.saying import calling_model
from . import short_model
from .conftest import LIMIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of a model whose template has tools and reasoning, which the model never learned."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    calling_model(folder, short_model.folder(), marks=False)
    config = load_config(
        env={},
        overrides={
            "engine.model_path": str(folder),
            "engine.dtype": "float32",
            "gateway.message_format": "qwen",
        },
    )
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        yield gateway.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as made:
        yield made


# --- Chat Completions ------------------------------------------------------------------------


USER: Any = {"role": "user", "content": "How is it in Oslo?"}
CHAT: Any = {"model": "tiny", "messages": [USER], "max_tokens": 300, "reasoning_effort": "none"}


class Weather(BaseModel):
    """How it is there."""

    city: Literal["Oslo", "Bergen"]


class Clock(BaseModel):
    """How late it is there."""

    zone: Literal["north", "south"]


class Verdict(BaseModel):
    cold: bool


KINDS: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}
STRICT: Any = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]
NAMED: Any = {"type": "function", "function": {"name": "Clock"}}


def checked(message: Any) -> list[str]:
    """The names of its calls, whose arguments are those of their tools."""
    for call in message.tool_calls:
        KINDS[call.function.name].model_validate_json(call.function.arguments)
    return [call.function.name for call in message.tool_calls]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_required_call_is_made(client: AsyncOpenAI, choice: Any, seed: int) -> None:
    """The same, streamed and whole."""
    asked = CHAT | {"tools": STRICT, "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"seed": seed}
    (whole,) = (await client.chat.completions.parse(**asked)).choices
    assert whole.message.content is None
    (name,) = checked(whole.message)
    assert name in ({"Clock"} if choice is NAMED else KINDS)
    async with client.chat.completions.stream(**asked) as stream:
        (streamed,) = (await stream.get_final_completion()).choices
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    told = [
        [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        for message in (whole.message, streamed.message)
    ]
    assert told[0] == told[1]


# Of other seeds some are still writing when their tokens are used up.
@pytest.mark.parametrize("seed", [2, 4, 5, 6])
async def test_an_answer_by_its_schema_or_calls_by_theirs(client: AsyncOpenAI, seed: int) -> None:
    answer = await client.chat.completions.parse(
        **CHAT, tools=STRICT, tool_choice="auto", response_format=Verdict, seed=seed
    )
    (choice,) = answer.choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
        assert checked(choice.message)
    else:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)


async def test_each_choice_has_calls_of_its_own(client: AsyncOpenAI) -> None:
    asked = CHAT | {"tools": STRICT, "tool_choice": "required", "n": 3, "seed": 7}
    messages = [
        choice.message for choice in (await client.chat.completions.create(**asked)).choices
    ]
    assert all(checked(message) for message in messages)
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids)


# --- Anthropic's Messages --------------------------------------------------------------------


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = ("weather", "climate")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def anthropic(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none", timeout=LIMIT_S) as made:
        yield made


async def both(client: AsyncAnthropic, **fields: Any) -> tuple[Message, Message]:
    """The same message, whole and put together of a stream."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": [USER],
        "tools": [{"name": name, "input_schema": SCHEMA} for name in TOOLS],
        "thinking": {"type": "disabled"},
        "extra_body": {"temperature": 0},
        **fields,
    }
    async with asyncio.timeout(LIMIT_S):
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    # The ids of calls are made of the message's.
    one, other = (
        [block.model_dump(exclude={"id"}) for block in message.content]
        for message in (whole, streamed)
    )
    assert one == other
    return whole, streamed


@pytest.mark.slow
@pytest.mark.parametrize("named", ["", "climate"])
async def test_anthropic_s_required_call_is_made(anthropic: AsyncAnthropic, named: str) -> None:
    choice = {"type": "tool", "name": named} if named else {"type": "any"}
    choice |= {"disable_parallel_tool_use": True}
    message, streamed = await both(anthropic, tool_choice=choice)
    assert message.stop_reason == streamed.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name in ([named] if named else TOOLS)
    jsonschema.validate(call.input, SCHEMA)


@pytest.mark.slow
async def test_a_result_is_handed_back(anthropic: AsyncAnthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "cold"}
    history = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    message, _ = await both(anthropic, messages=history, tool_choice={"type": "none"}, max_tokens=8)
    assert all(block.type != "tool_use" for block in message.content)


# --- Responses -------------------------------------------------------------------------------


RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": "How is it there?",
    "tools": [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in TOOLS
    ],
    "temperature": 0,
    "reasoning": {"effort": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize("named", ["", "climate"])
async def test_a_response_s_required_call_is_made(client: AsyncOpenAI, named: str) -> None:
    choice: Any = {"type": "function", "name": named} if named else "required"
    asked = RESPONSE | {"tool_choice": choice, "parallel_tool_calls": False}
    async with asyncio.timeout(LIMIT_S):
        first = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        call = first.output[-1]
        assert call.type == "function_call"
        assert call.name in ([named] if named else TOOLS)
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert first.status == "completed"
        again = streamed.output[-1]
        assert again.type == "function_call"
        assert (again.name, again.arguments) == (call.name, call.arguments)
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
        asked = RESPONSE | {"input": [output], "tool_choice": "none", "max_output_tokens": 8}
        second = await client.responses.create(**asked, previous_response_id=first.id)
        assert [item.type for item in second.output] == ["message"]


@pytest.mark.slow
async def test_a_response_in_a_form_or_calls(client: AsyncOpenAI) -> None:
    """Whichever the model writes, it is one of both."""
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    asked = RESPONSE | {"temperature": 1, "text": {"format": form}}
    valid = 0
    async with asyncio.timeout(LIMIT_S):
        for seed in range(8):
            answer = await client.responses.create(**asked, extra_body={"seed": seed})
            texts = [item.arguments for item in answer.output if item.type == "function_call"]
            texts += [answer.output_text] if answer.output_text else []
            for text in texts if answer.status == "completed" else []:
                jsonschema.validate(json.loads(text), SCHEMA)
                valid += 1
    assert valid
