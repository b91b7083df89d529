"""openai-python's loop of tools, with chats: whole, streamed by its helper, parsed, handed back."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from nano_inference.config import Config
from nano_inference.gateway.serving.words import Words

from ...fake import FakeEngine
from ...saying import says

LIMIT_S = 20
HELLO: Any = [{"role": "user", "content": "How is it in Oslo and Bergen?"}]
CALLS = (
    "<think>\nI look it up.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)


class Weather(BaseModel):
    """How it is there."""

    city: str


class Verdict(BaseModel):
    cold: bool


TOOLS: Any = [openai.pydantic_function_tool(Weather)]
CITIES = [Weather(city="Oslo"), Weather(city="Bergen")]


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


@pytest.mark.parametrize("parses", [False, True])
async def test_the_loop(
    client: AsyncOpenAI, engine: FakeEngine, words: Words, parses: bool
) -> None:
    """Its message, handed back as it is, is the one that the model wrote."""
    completions = client.chat.completions
    ask: Any = completions.parse if parses else completions.create
    engine.outputs = says(CALLS, words)
    first = await ask(model="tiny", messages=HELLO, tools=TOOLS)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "I look it up."
    given = [
        Weather.model_validate_json(call.function.arguments) for call in choice.message.tool_calls
    ]
    assert given == CITIES
    if parses:
        assert [call.function.parsed_arguments for call in choice.message.tool_calls] == CITIES
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "cold"}
        for call in choice.message.tool_calls
    ]
    engine.outputs = says("Cold in both.", words)
    messages: Any = [*HELLO, choice.message, *results]
    second = await ask(model="tiny", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Cold in both."
    assert second.choices[0].finish_reason == "stop"
    prompt = words.text(engine.requests[-1].prompt_token_ids or (), skip_special=False)
    assert f"assistant\n{CALLS}<|im_end|>\n" in prompt
    assert prompt.count("<|im_start|>tool\ncold<|im_end|>\n") == 2


@pytest.mark.parametrize("cut", [1, 7, 1000])
async def test_the_stream_helper_assembles_calls(
    client: AsyncOpenAI, engine: FakeEngine, words: Words, cut: int
) -> None:
    engine.outputs = says(CALLS, words, cut=cut)
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        events: list[Any] = [event async for event in stream]
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == CITIES
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == CITIES
    texts = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(texts) == "Let me see."
    details = answer.usage and answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens
    whole = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    assert whole.choices[0].message.content == choice.message.content
    told = [call.function.arguments for call in whole.choices[0].message.tool_calls or []]  # type: ignore[union-attr]
    assert told == [call.function.arguments for call in calls]


async def test_a_schema_of_the_answer_and_tools_that_may_be_called_live_together(
    client: AsyncOpenAI, engine: FakeEngine, words: Words
) -> None:
    """One grammar says: this answer, or calls. A schema need not suppress them (vLLM 16313)."""
    completions = client.chat.completions
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "auto",
        "response_format": Verdict,
    }
    engine.outputs = says('{"cold": true}', words)
    answer = await completions.parse(**asked)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed == Verdict(cold=True)
    constraint = engine.requests[-1].sampling.constraint
    assert constraint is not None
    assert constraint.lark is not None
    assert all(name in constraint.lark for name in ("cold", "Weather", "city"))
    engine.outputs = says(CALLS.replace("Let me see.\n", ""), words)
    answer = await completions.parse(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == CITIES


BROKEN = '<tool_call>\n{"name": "Weather", "arguments": {"city": </tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "calls"),
    [
        (BROKEN, "stop", 0),
        (BROKEN[:30], "length", 0),
        (BROKEN[:30], "stop", 0),
        ("Cold.", "stop", 0),
        (CALLS, "length", 2),
    ],
)
async def test_invalid_or_cut_calls_are_text(
    client: AsyncOpenAI,
    engine: FakeEngine,
    words: Words,
    text: str,
    reason: Any,
    calls: int,
    stream: bool,
) -> None:
    """What is no call, or was cut off, is text; and `tool_calls` is no reason without one."""
    engine.outputs = says(text, words, reason=reason)
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
    if stream:
        message, found, ended = "", 0, None
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            message += choice.delta.content or ""
            found += len(choice.delta.tool_calls or ())
            ended = choice.finish_reason
    else:
        answer = await client.chat.completions.create(**asked)
        message = answer.choices[0].message.content or ""
        found = len(answer.choices[0].message.tool_calls or ())
        ended = answer.choices[0].finish_reason
    assert (ended, found) == (reason, calls)
    assert message == (text if not calls else "Let me see.")
