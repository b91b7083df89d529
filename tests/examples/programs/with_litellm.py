"""LiteLLM, by OpenAI's interface and by Anthropic's."""

from __future__ import annotations

import json
import os
from typing import Any

# Prices of models are not asked for.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import given
import litellm
from person import Person
from promises import URL, cancels, keep, promise, raises

INTERFACES = {
    "OpenAI's": {"model": f"openai/{given.MODEL}", "api_base": f"{URL}/v1"},
    "hosted vLLM's": {"model": f"hosted_vllm/{given.MODEL}", "api_base": f"{URL}/v1"},
    "Anthropic's": {"model": f"anthropic/{given.MODEL}", "api_base": URL, "max_tokens": 200},
}
WEATHER = {"type": "function", "function": given.WEATHER | {"parameters": given.CITY}}


def ask(interface: str, text: str, **options: Any) -> Any:
    asked = INTERFACES[interface] | {"api_key": "none", "num_retries": 0} | options
    return litellm.completion(messages=[{"role": "user", "content": text}], **asked)


@promise
def answer_has_text_and_usage() -> None:
    for interface in INTERFACES:
        answer = ask(interface, given.SUM, temperature=0)
        assert answer.choices[0].message.content == given.TOTAL
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.completion_tokens > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    for interface in INTERFACES:
        options = {"include_usage": True}
        chunks = list(ask(interface, given.SUM, temperature=0, stream=True, stream_options=options))
        whole = litellm.stream_chunk_builder(chunks)
        assert whole.choices[0].message.content == given.TOTAL
        assert whole.usage.completion_tokens > 0


@promise
def parsed_answer_keeps_its_schema() -> None:
    for interface in INTERFACES:
        answer = ask(interface, given.PERSON, response_format=Person)
        Person.model_validate_json(answer.choices[0].message.content)


@promise
def tool_call_is_parsed() -> None:
    for interface in INTERFACES:
        for choice in ("auto", "required"):
            for stream in (False, True):
                answer = ask(
                    interface,
                    given.FORECAST,
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
        with raises(litellm.ContextWindowExceededError, str(given.CONTEXT_LENGTH)):
            ask(interface, given.TOO_LONG)
        with raises(litellm.BadRequestError, "top_p"):
            ask(interface, given.SUM, top_p=7)
        unknown = INTERFACES[interface]["model"] + "2"
        with raises(litellm.NotFoundError):
            ask(interface, given.SUM, model=unknown)


@promise
def closing_a_stream_cancels_it() -> None:
    with cancels():
        stream = ask(
            "OpenAI's",
            given.SUM,
            stream=True,
            max_tokens=given.ENDLESS_TOKENS,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        stream.completion_stream.close()


keep()
