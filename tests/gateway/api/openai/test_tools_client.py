"""openai-python's loop of tools, with chats and with responses: whole, streamed by its helpers,
parsed, chained, handed back."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from nano_inference.config import Config

from ...saying import Model

QUESTION = "How is it in Oslo and Bergen?"
HELLO: Any = [{"role": "user", "content": QUESTION}]
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


TOOL: Any = openai.pydantic_function_tool(Weather)
TOOLS: Any = [TOOL]
FLAT_TOOLS: Any = [{"type": "function"} | TOOL["function"]]
CITIES = [Weather(city="Oslo"), Weather(city="Bergen")]
CHAT: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
RESPONSE: Any = {"model": "tiny", "input": QUESTION, "tools": FLAT_TOOLS}


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


@pytest.mark.parametrize("parses", [False, True])
async def test_the_loop_of_chats(client: AsyncOpenAI, model: Model, parses: bool) -> None:
    """Its message, handed back as it is, is the one that the model wrote."""
    completions = client.chat.completions
    ask: Any = completions.parse if parses else completions.create
    model.says(CALLS)
    first = await ask(**CHAT)
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
    model.says(ANSWER)
    messages: Any = [*HELLO, choice.message, *results]
    second = await ask(**CHAT | {"messages": messages})
    assert second.choices[0].message.content == ANSWER
    assert second.choices[0].finish_reason == "stop"
    prompt = model.prompt()
    assert f"assistant\n{CALLS}<|im_end|>\n" in prompt
    assert prompt.count("<|im_start|>tool\ncold<|im_end|>\n") == 2


@pytest.mark.parametrize("cut", [1, 7, 1000])
async def test_the_stream_helper_assembles_calls_of_chats(
    client: AsyncOpenAI, model: Model, cut: int
) -> None:
    model.says(CALLS, cut=cut)
    async with client.chat.completions.stream(
        **CHAT, stream_options={"include_usage": True}
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
    assert details.reasoning_tokens


async def test_a_schema_of_the_answer_and_tools_that_may_be_called_live_together(
    client: AsyncOpenAI, model: Model
) -> None:
    """One grammar says: this answer, or calls. A schema need not suppress them (vLLM 16313)."""
    completions = client.chat.completions
    asked: Any = CHAT | {"tool_choice": "auto", "response_format": Verdict}
    model.says('{"cold": true}')
    answer = await completions.parse(**asked)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed == Verdict(cold=True)
    constraint = model.constraint
    assert all(name in constraint.lark for name in ("cold", "Weather", "city"))
    model.says(CALLS.replace("Let me see.\n", ""))
    answer = await completions.parse(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == CITIES


def outputs_of(response: Any) -> list[Any]:
    """What the caller's function gives for each call."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cold"}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("chained", [True, False])
async def test_the_loop_of_responses(client: AsyncOpenAI, model: Model, chained: bool) -> None:
    """By the id of the response before, or with its items handed back."""
    model.says(CALLS)
    first = await client.responses.create(**RESPONSE)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in first.output] == kinds
    assert first.output_text == "Let me see."
    counted = await client.responses.input_tokens.count(**RESPONSE)
    assert counted.input_tokens == len(model.requests[0].prompt_token_ids or ())
    outputs = outputs_of(first)
    model.says(ANSWER)
    given: list[Any] = [{"role": "user", "content": QUESTION}, *first.output, *outputs]
    more: dict[str, Any] = {"previous_response_id": first.id} if chained else {}
    second = await client.responses.create(
        **RESPONSE | {"input": outputs if chained else given} | more
    )
    assert second.output_text == ANSWER
    prompt = model.prompt()
    assert f"assistant\n{CALLS}<|im_end|>\n" in prompt
    assert prompt.count("<|im_start|>tool\ncold(Weather)<|im_end|>\n") == 2


async def test_the_stream_helper_assembles_calls_of_responses(
    client: AsyncOpenAI, model: Model
) -> None:
    model.says(CALLS)
    async with client.responses.stream(**RESPONSE | {"tools": TOOLS}) as stream:
        events: list[Any] = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *_, one, two = response.output
    assert one.type == two.type == "function_call"
    assert [one.parsed_arguments, two.parsed_arguments] == CITIES
    snapshots = [
        event.snapshot for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert snapshots == [one.arguments, two.arguments]
    thought = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "I look it up."
    plain = await client.responses.create(**RESPONSE, stream=True)
    assert [event.type async for event in plain] == [event.type for event in events]


async def test_it_parses_answers(client: AsyncOpenAI, model: Model) -> None:
    model.says('{"cold": true}')
    verdict = await client.responses.parse(**RESPONSE | {"tools": TOOLS}, text_format=Verdict)
    assert verdict.output_parsed == Verdict(cold=True)
