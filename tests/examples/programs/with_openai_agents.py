"""OpenAI's Agents SDK, by responses and by chats."""

from __future__ import annotations

from typing import Any

import given
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from person import Person
from promises import URL, cancels, keep, promise, raises

# They would go to OpenAI.
set_tracing_disabled(True)
MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
get_weather = function_tool(given.get_weather)


class StrictPerson(Person, extra="forbid"):
    """A person in the strict form that Responses require."""


client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def agent(kind: Any, name: str = given.MODEL, **options: Any) -> Agent:
    settings = ModelSettings(temperature=0, include_usage=True, **options.pop("settings", {}))
    model = kind(model=name, openai_client=client)
    return Agent(name="helper", model=model, model_settings=settings, **options)


@promise
async def tool_is_called_and_its_result_taken() -> None:
    for kind in MODELS:
        given.cities.clear()
        result = await Runner.run(agent(kind, tools=[get_weather]), given.FORECAST, max_turns=3)
        assert given.cities == ["Oslo"]
        assert result.final_output
        usage = result.context_wrapper.usage
        assert usage.requests == 2
        assert usage.output_tokens > 0


@promise
async def stream_is_the_answer_in_parts() -> None:
    for kind in MODELS:
        stream = Runner.run_streamed(agent(kind), given.SUM)
        text = ""
        async for event in stream.stream_events():
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.output_text.delta":
                text += data.delta
        assert text == stream.final_output == given.TOTAL
        assert stream.context_wrapper.usage.output_tokens > 0


@promise
async def output_keeps_its_schema() -> None:
    for kind in MODELS:
        result = await Runner.run(agent(kind, output_type=StrictPerson), given.PERSON)
        assert isinstance(result.final_output, StrictPerson)


@promise
async def handoff_gives_the_conversation_to_another_agent() -> None:
    for kind in MODELS:
        calculator = agent(kind, handoff_description="Computes sums")
        calculator.name = "calculator"
        required = {"settings": {"tool_choice": "required"}}
        result = await Runner.run(agent(kind, handoffs=[calculator], **required), given.SUM)
        assert result.last_agent is calculator


@promise
async def errors_have_their_classes() -> None:
    for kind in MODELS:
        with raises(openai.BadRequestError, "context_length_exceeded"):
            await Runner.run(agent(kind), given.TOO_LONG)
        with raises(openai.NotFoundError, "model_not_found"):
            await Runner.run(agent(kind, "none"), given.SUM)


@promise
async def cancelled_run_cancels_its_request() -> None:
    settings = {"max_tokens": given.ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
    for kind in MODELS:
        stream = Runner.run_streamed(agent(kind, settings=settings), given.SUM)
        with cancels():
            async for event in stream.stream_events():
                if getattr(getattr(event, "data", None), "type", "").endswith(".delta"):
                    stream.cancel()


keep()
