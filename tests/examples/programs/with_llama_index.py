"""LlamaIndex: its model for servers like OpenAI's, and an agent."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from promises import (
    CONTEXT_LENGTH,
    ENDLESS_TOKENS,
    FORECAST,
    MODEL,
    PERSON,
    SUM,
    TOO_LONG,
    TOTAL,
    URL,
    cancels,
    keep,
    promise,
    raises,
)
from pydantic import BaseModel, Field

cities: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather in a city"""
    cities.append(city)
    return '{"sky": "sunny", "degrees": 21}'


class Person(BaseModel):
    """Whom a text is about."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    job: Literal["chef", "pilot", "teacher"]


def model(name: str = MODEL, **options: Any) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=CONTEXT_LENGTH,
        max_retries=0,
        temperature=0,
        **options,
    )


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


@promise
def answer_has_text_and_usage() -> None:
    answer = model().chat(asked(SUM))
    assert answer.message.content == TOTAL
    assert answer.raw.usage.completion_tokens > 0
    assert model().complete(SUM).text == TOTAL


@promise
async def stream_is_the_answer_in_parts() -> None:
    assert "".join(part.delta or "" for part in model().stream_chat(asked(SUM))) == TOTAL
    parts = await model().astream_chat(asked(SUM))
    assert "".join([part.delta or "" async for part in parts]) == TOTAL


@promise
def output_keeps_its_schema() -> None:
    for options in ({}, {"should_use_structured_outputs": True}):
        answer = model(**options).as_structured_llm(Person).chat(asked(PERSON))
        assert isinstance(answer.raw, Person)


@promise
async def agent_calls_its_tool_and_takes_the_result() -> None:
    cities.clear()
    agent = FunctionAgent(tools=[get_weather], llm=model())
    handler = agent.run(user_msg=FORECAST, max_iterations=4)
    results = [
        event async for event in handler.stream_events() if isinstance(event, ToolCallResult)
    ]
    assert cities[0] == "Oslo"
    assert results[0].tool_kwargs == {"city": "Oslo"}
    assert str(await handler)


@promise
def errors_have_their_classes() -> None:
    with raises(openai.BadRequestError, "context_length_exceeded"):
        model().chat(asked(TOO_LONG))
    with raises(openai.NotFoundError, "model_not_found"):
        model("none").chat(asked(SUM))


@promise
async def cancelled_call_cancels_its_request() -> None:
    endless = model(
        max_tokens=ENDLESS_TOKENS, additional_kwargs={"n": 32, "extra_body": {"ignore_eos": True}}
    )
    with cancels(), raises(TimeoutError):
        async with asyncio.timeout(1):
            await endless.achat(asked(SUM))


keep()
