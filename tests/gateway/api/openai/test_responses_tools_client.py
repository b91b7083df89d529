"""openai-python's loop of tools, with responses: streamed, parsed, chained, and handed back."""

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
QUESTION = "How is it in Oslo?"
CALLS = (
    "<think>\nI look it up.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)
ANSWER = "Cold in both."


class Weather(BaseModel):
    """How it is there."""

    city: str


class Verdict(BaseModel):
    cold: bool


TOOL = openai.pydantic_function_tool(Weather)
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "Weather",
        "description": "How it is there.",
        "parameters": TOOL["function"]["parameters"],
        "strict": True,
    }
]


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


def outputs_of(response: Any) -> list[Any]:
    """What the caller's function gives for each call."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cold"}
        for item in response.output
        if item.type == "function_call"
    ]


async def test_input_tokens_count_tools(client: AsyncOpenAI, engine: FakeEngine) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input=QUESTION, tools=TOOLS)
    await client.responses.create(model="tiny", input=QUESTION, tools=TOOLS)
    assert counted.input_tokens == len(engine.requests[0].prompt_token_ids or ())
    fewer = await client.responses.input_tokens.count(model="tiny", input=QUESTION)
    assert fewer.input_tokens < counted.input_tokens


@pytest.mark.parametrize("chained", [True, False])
async def test_the_loop(
    client: AsyncOpenAI, engine: FakeEngine, words: Words, chained: bool
) -> None:
    """By the id of the response before, or with its items handed back."""
    engine.outputs = says(CALLS, words)
    first = await client.responses.create(model="tiny", input=QUESTION, tools=TOOLS)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in first.output] == kinds
    assert first.output_text == "Let me see."
    outputs = outputs_of(first)
    engine.outputs = says(ANSWER, words)
    given: list[Any] = [{"role": "user", "content": QUESTION}, *first.output, *outputs]
    more: dict[str, Any] = {"previous_response_id": first.id} if chained else {}
    second = await client.responses.create(
        model="tiny", input=outputs if chained else given, tools=TOOLS, **more
    )
    assert second.output_text == ANSWER
    prompt = words.text(engine.requests[-1].prompt_token_ids or (), skip_special=False)
    assert f"assistant\n{CALLS}<|im_end|>\n" in prompt
    assert prompt.count("<|im_start|>tool\ncold(Weather)<|im_end|>\n") == 2


async def test_the_stream_helper_assembles_calls(
    client: AsyncOpenAI, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(CALLS, words)
    async with client.responses.stream(model="tiny", input=QUESTION, tools=[TOOL]) as stream:
        events: list[Any] = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *_, one, two = response.output
    assert one.type == two.type == "function_call"
    parsed = [item.parsed_arguments for item in (one, two)]
    assert parsed == [Weather(city="Oslo"), Weather(city="Bergen")]
    snapshots = [
        event.snapshot for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert snapshots == [one.arguments, two.arguments]
    thought = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "I look it up."
    plain = await client.responses.create(model="tiny", input=QUESTION, tools=TOOLS, stream=True)
    assert [event.type async for event in plain] == [event.type for event in events]


async def test_it_parses_calls_and_answers(
    client: AsyncOpenAI, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(CALLS, words)
    response = await client.responses.parse(model="tiny", input=QUESTION, tools=[TOOL])
    *_, one, two = response.output
    assert one.type == two.type == "function_call"
    assert [one.parsed_arguments, two.parsed_arguments] == [
        Weather(city="Oslo"),
        Weather(city="Bergen"),
    ]
    engine.outputs = says('{"cold": true}', words)
    verdict = await client.responses.parse(
        model="tiny", input=QUESTION, tools=[TOOL], text_format=Verdict
    )
    assert verdict.output_parsed == Verdict(cold=True)
