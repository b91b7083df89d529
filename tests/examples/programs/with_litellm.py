"""LiteLLM, by OpenAI's interface and by Anthropic's."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

# Prices of models are not asked for.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm
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

INTERFACES = {
    "OpenAI's": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted vLLM's": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "Anthropic's": {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 200},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    job: Literal["chef", "pilot", "teacher"]


def ask(interface: str, text: str, **options: Any) -> Any:
    asked = INTERFACES[interface] | {"api_key": "none", "num_retries": 0} | options
    return litellm.completion(messages=[{"role": "user", "content": text}], **asked)


@promise
def answer_has_text_and_usage() -> None:
    for interface in INTERFACES:
        answer = ask(interface, SUM, temperature=0)
        assert answer.choices[0].message.content == TOTAL
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.completion_tokens > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    for interface in INTERFACES:
        options = {"include_usage": True}
        chunks = list(ask(interface, SUM, temperature=0, stream=True, stream_options=options))
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == TOTAL
        assert whole.usage.completion_tokens > 0


@promise
def parsed_answer_keeps_its_schema() -> None:
    for interface in INTERFACES:
        answer = ask(interface, PERSON, response_format=Person)
        Person.model_validate_json(answer.choices[0].message.content)


@promise
def tool_call_is_parsed() -> None:
    for interface in INTERFACES:
        for choice in ("auto", "required"):
            for stream in (False, True):
                answer = ask(
                    interface,
                    FORECAST,
                    temperature=0,
                    tools=[WEATHER],
                    tool_choice=choice,
                    stream=stream,
                )
                if stream:
                    answer = litellm.stream_chunk_builder(list(answer))
                assert answer.choices[0].finish_reason == "tool_calls"
                (call,) = answer.choices[0].message.tool_calls
                assert call.function.name == "get_weather"
                assert json.loads(call.function.arguments)["city"]


@promise
def errors_have_their_classes() -> None:
    for interface in INTERFACES:
        with raises(litellm.ContextWindowExceededError, str(CONTEXT_LENGTH)):
            ask(interface, TOO_LONG)
        with raises(litellm.BadRequestError, "top_p"):
            ask(interface, SUM, top_p=7)
        unknown = INTERFACES[interface]["model"] + "2"
        with raises(litellm.NotFoundError):
            ask(interface, SUM, model=unknown)


@promise
def closing_a_stream_cancels_it() -> None:
    with cancels():
        stream = ask(
            "OpenAI's",
            SUM,
            stream=True,
            max_tokens=ENDLESS_TOKENS,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        stream.completion_stream.close()


keep()
