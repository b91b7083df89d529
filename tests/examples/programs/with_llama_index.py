"""LlamaIndex: its model for servers like OpenAI's, and an agent."""

from __future__ import annotations

import asyncio
from typing import Any

import given
import openai
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from person import Person
from promises import URL, cancels, keep, promise, raises


def model(name: str = given.MODEL, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=given.CONTEXT_LENGTH,
        max_retries=0,
        temperature=0,
        **options,
    )


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


@promise
def answer_has_text_and_usage() -> None:
    answer = model().chat(asked(given.SUM))
    assert answer.message.content == given.TOTAL
    assert answer.raw.usage.completion_tokens > 0
    assert model().complete(given.SUM).text == given.TOTAL


@promise
async def stream_is_the_answer_in_parts() -> None:
    assert (
        "".join(part.delta or "" for part in model().stream_chat(asked(given.SUM))) == given.TOTAL
    )
    parts = await model().astream_chat(asked(given.SUM))
    assert "".join([part.delta or "" async for part in parts]) == given.TOTAL


@promise
def output_keeps_its_schema() -> None:
    for options in ({}, {"should_use_structured_outputs": True}):
        answer = model(**options).as_structured_llm(Person).chat(asked(given.PERSON))
        assert isinstance(answer.raw, Person)


@promise
async def agent_calls_its_tool_and_takes_the_result() -> None:
    given.cities.clear()
    agent = FunctionAgent(tools=[given.get_weather], llm=model())
    handler = agent.run(user_msg=given.FORECAST, max_iterations=4)
    results = [
        event async for event in handler.stream_events() if isinstance(event, ToolCallResult)
    ]
    assert given.cities[0] == "Oslo"
    assert results[0].tool_kwargs == {"city": "Oslo"}
    assert str(await handler)


@promise
def errors_have_their_classes() -> None:
    with raises(openai.BadRequestError, "context_length_exceeded"):
        model().chat(asked(given.TOO_LONG))
    with raises(openai.NotFoundError, "model_not_found"):
        model("none").chat(asked(given.SUM))


@promise
async def cancelled_call_cancels_its_request() -> None:
    endless = model(
        max_tokens=given.ENDLESS_TOKENS,
        additional_kwargs={"n": 32, "extra_body": {"ignore_eos": True}},
    )
    with cancels(), raises(TimeoutError):
        async with asyncio.timeout(1):
            await endless.achat(asked(given.SUM))


keep()
