"""Pydantic AI, by OpenAI's chats, its responses and Anthropic's messages."""

from __future__ import annotations

import asyncio

import given
from person import Person
from promises import URL, cancels, keep, promise, raises
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY = {"extra_body": {"temperature": 0}}


def models(name: str = given.MODEL) -> list[Model]:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=URL, api_key="none")
    return [
        OpenAIChatModel(name, provider=openai),
        OpenAIResponsesModel(name, provider=openai),
        AnthropicModel(name, provider=anthropic),
    ]


@promise
async def answer_has_text_and_usage() -> None:
    for model in models():
        result = await Agent(model, model_settings=GREEDY).run(given.SUM)
        assert result.output == given.TOTAL
        assert result.usage.input_tokens > 0
        assert result.usage.output_tokens > 0


@promise
async def stream_is_the_answer_in_parts() -> None:
    for model in models():
        async with Agent(model, model_settings=GREEDY).run_stream(given.SUM) as stream:
            parts = [part async for part in stream.stream_text(delta=True)]
        assert "".join(parts) == given.TOTAL


@promise
async def output_keeps_its_schema() -> None:
    for model in models():
        for output in (NativeOutput(Person), ToolOutput(Person)):
            # The library has a list of the models of Anthropic that can.
            if isinstance(output, NativeOutput) and isinstance(model, AnthropicModel):
                continue
            result = await Agent(model, output_type=output, model_settings=GREEDY).run(given.PERSON)
            assert isinstance(result.output, Person)


@promise
async def tool_is_called_and_its_result_taken() -> None:
    for model in models():
        given.cities.clear()
        agent = Agent(model, tools=[given.get_weather], model_settings=GREEDY)
        result = await agent.run(given.FORECAST)
        assert given.cities == ["Oslo"]
        assert result.output
        assert result.usage.requests == 2


@promise
async def errors_have_their_class_and_status() -> None:
    for model in models():
        with raises(ModelHTTPError, "status_code: 400", str(given.CONTEXT_LENGTH)):
            await Agent(model).run(given.TOO_LONG)
    for model in models("none"):
        with raises(ModelHTTPError, "status_code: 404"):
            await Agent(model).run(given.SUM)


@promise
async def cancelled_run_cancels_its_request() -> None:
    model = models()[0]
    settings = {"max_tokens": given.ENDLESS_TOKENS, "extra_body": {"ignore_eos": True, "n": 32}}
    with cancels(), raises(TimeoutError):
        async with asyncio.timeout(1):
            await Agent(model, model_settings=settings).run(given.SUM)


keep()
