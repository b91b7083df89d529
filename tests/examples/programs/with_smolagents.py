"""smolagents: its model for servers like OpenAI's, and agents that call tools."""

from __future__ import annotations

import gc
import json
from typing import Any

import given
import openai
from promises import URL, cancels, keep, promise, raises
from smolagents import (
    ActionStep,
    AgentGenerationError,
    ChatMessage,
    MessageRole,
    OpenAIModel,
    ToolCallingAgent,
    tool,
)

cities: list[str] = []
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city

    Args:
        city: The city
    """
    cities.append(city)
    return '{"sky": "sunny", "degrees": 21}'


def model(name: str = given.MODEL, **options: Any) -> OpenAIModel:
    client = {"max_retries": 0}
    return OpenAIModel(
        name, api_base=f"{URL}/v1", api_key="none", client_kwargs=client, retry=False, **options
    )


def asked(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


@promise
def answer_has_text_and_usage() -> None:
    answer = model(temperature=0).generate(asked(given.SUM))
    assert answer.content == given.TOTAL
    assert answer.token_usage.output_tokens > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    parts = list(model(temperature=0).generate_stream(asked(given.SUM)))
    assert "".join(part.content or "" for part in parts) == given.TOTAL
    assert sum(part.token_usage.output_tokens for part in parts if part.token_usage) > 0


@promise
def answer_keeps_its_schema() -> None:
    schema = {"name": "person", "schema": SCHEMA, "strict": True}
    answer = model().generate(
        asked(given.PERSON), response_format={"type": "json_schema", "json_schema": schema}
    )
    assert json.loads(answer.content).keys() == {"name", "age"}


@promise
def agent_calls_tools_only() -> None:
    """It sends `tool_choice: required`, so that each step has a call that can be read."""
    agent = ToolCallingAgent(
        tools=[get_weather], model=model(temperature=0), max_steps=2, verbosity_level=0
    )
    agent.prompt_templates["system_prompt"] = "You are helpful."
    result = agent.run(given.FORECAST, return_full_result=True)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert cities
    # The answer after the last step that it may make is asked for without tools.
    answers = [step.model_output_message for step in steps if step.model_output_message]
    assert all(answer.tool_calls for answer in answers), answers
    assert result.token_usage.output_tokens > 0


@promise
def errors_have_their_classes() -> None:
    with raises(openai.BadRequestError, "context_length_exceeded"):
        model().generate(asked(given.TOO_LONG))
    with raises(openai.NotFoundError, "model_not_found"):
        model("none").generate(asked(given.SUM))
    agent = ToolCallingAgent(tools=[get_weather], model=model("none"), verbosity_level=0)
    with raises(AgentGenerationError, "there is no model 'none'"):
        agent.run(given.SUM)


@promise
def closing_a_stream_cancels_it() -> None:
    endless = model(max_tokens=given.ENDLESS_TOKENS, extra_body={"ignore_eos": True})
    with cancels():
        stream = endless.generate_stream(asked(given.SUM))
        next(stream)
        # It has no way to close the connection but to be forgotten.
        del stream
        gc.collect()


keep()
