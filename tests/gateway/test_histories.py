"""Clients send back the very objects that they received, turn by turn, streamed and whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from nano_inference.config import Config

from ..soaking import in_soak
from .fake import app_of
from .histories import TOOL, TURNS, HistoryEngine, check_histories, question, result
from .saying import calling_model

DESCRIPTION = "How it is in a place"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "array"}},
    "required": ["place"],
}
FUNCTION: dict[str, Any] = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return calling_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine(config: Config) -> HistoryEngine:
    return HistoryEngine(config)


@pytest.fixture
async def options(engine: HistoryEngine, config: Config) -> AsyncIterator[dict[str, Any]]:
    transport = httpx2.ASGITransport(app_of(engine, config))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        yield {"api_key": "none", "max_retries": 0, "http_client": http_client}


async def chat(options: dict[str, Any], turns: int, *, streamed: bool) -> None:
    messages: list[Any] = []
    asked: Any = {"model": "tiny", "tools": [{"type": "function", "function": FUNCTION}]}
    async with AsyncOpenAI(base_url="http://127.0.0.1/v1", **options) as client:

        async def answer() -> Any:
            if not streamed:
                made = await client.chat.completions.create(messages=messages, **asked)
                return made.choices[0].message
            async with client.chat.completions.stream(messages=messages, **asked) as stream:
                return (await stream.get_final_completion()).choices[0].message

        for turn in range(1, turns + 1):
            messages.append({"role": "user", "content": question(turn)})
            while True:
                message = await answer()
                messages.append(message)
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = result(str(turn))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def responses(options: dict[str, Any], turns: int, *, streamed: bool) -> None:
    items: list[Any] = []
    asked: Any = {"model": "tiny", "tools": [{"type": "function", **FUNCTION}], "store": False}
    async with AsyncOpenAI(base_url="http://127.0.0.1/v1", **options) as client:

        async def answer() -> Any:
            if not streamed:
                return await client.responses.create(input=items, **asked)
            async with client.responses.stream(input=items, **asked) as stream:
                return await stream.get_final_response()

        for turn in range(1, turns + 1):
            items.append({"role": "user", "content": question(turn)})
            called = True
            while called:
                output = (await answer()).output
                items += output
                called = False
                for each in output:
                    if each.type == "function_call":
                        called = True
                        content = {"call_id": each.call_id, "output": result(str(turn))}
                        items.append({"type": "function_call_output", **content})


async def messages(options: dict[str, Any], turns: int, *, streamed: bool) -> None:
    history: list[Any] = []
    tool = {"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}
    thinking = {"type": "adaptive", "display": "omitted" if streamed else "summarized"}
    asked: Any = {"model": "tiny", "max_tokens": 500, "tools": [tool], "thinking": thinking}
    async with AsyncAnthropic(base_url="http://127.0.0.1", **options) as client:

        async def answer() -> Any:
            if not streamed:
                return await client.messages.create(messages=history, **asked)
            async with client.messages.stream(messages=history, **asked) as stream:
                return await stream.get_final_message()

        for turn in range(1, turns + 1):
            history.append({"role": "user", "content": question(turn)})
            while True:
                message = await answer()
                history.append({"role": "assistant", "content": message.content})
                if message.stop_reason != "tool_use":
                    break
                history.append(
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": block.id,
                                "content": result(str(turn)),
                            }
                            for block in message.content
                            if block.type == "tool_use"
                        ],
                    }
                )


Conversing = Callable[..., Awaitable[None]]


@pytest.mark.parametrize("turns", [2, in_soak(TURNS)])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("converse", [chat, responses, messages])
async def test_a_client_s_history_is_what_the_model_wrote(
    options: dict[str, Any],
    engine: HistoryEngine,
    converse: Conversing,
    streamed: bool,
    turns: int,
) -> None:
    await converse(options, turns, streamed=streamed)
    check_histories(engine.written, turns)
