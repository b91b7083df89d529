"""OpenAI's library."""

from __future__ import annotations

import given
import openai
from openai import AsyncOpenAI, OpenAI
from person import Person
from promises import URL, cancels, keep, promise, raises
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
question = [{"role": "user", "content": given.SUM}]


class get_weather(BaseModel):
    """Get the weather in a city"""

    city: str


@promise
def answer_has_text_and_usage() -> None:
    answer = client.chat.completions.create(model=given.MODEL, messages=question, temperature=0)
    assert answer.choices[0].message.content == given.TOTAL
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    with client.chat.completions.stream(
        model=given.MODEL, messages=question, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        whole = stream.get_final_completion()
    assert text == whole.choices[0].message.content == given.TOTAL
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


@promise
def parsed_answer_keeps_its_schema() -> None:
    answer = client.chat.completions.parse(
        model=given.MODEL,
        messages=[{"role": "user", "content": given.PERSON}],
        response_format=Person,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert isinstance(
        client.responses.parse(
            model=given.MODEL, input=given.PERSON, text_format=Person
        ).output_parsed,
        Person,
    )


@promise
def tool_call_is_parsed() -> None:
    tool = openai.pydantic_function_tool(get_weather)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.parse(
            model=given.MODEL,
            messages=[{"role": "user", "content": given.FORECAST}],
            temperature=0,
            tools=[tool],
            tool_choice=choice,
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, get_weather)
        assert call.function.parsed_arguments.city


@promise
def errors_have_their_classes() -> None:
    chat = client.chat.completions
    with raises(openai.BadRequestError, "context_length_exceeded"):
        chat.create(model=given.MODEL, messages=[{"role": "user", "content": given.TOO_LONG}])
    with raises(openai.BadRequestError, "invalid_top_p"):
        chat.create(model=given.MODEL, messages=question, top_p=7)
    with raises(openai.NotFoundError, "model_not_found"):
        chat.create(model="gpt-5", messages=question)
    with raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    with raises(openai.BadRequestError):
        chat.create(model=given.MODEL, messages=question, extra_body={"bogus": 1})


@promise
def closing_a_stream_cancels_it() -> None:
    with (
        cancels(),
        client.chat.completions.create(
            model=given.MODEL,
            messages=question,
            stream=True,
            max_tokens=given.ENDLESS_TOKENS,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        next(iter(stream))


@promise
async def timeout_cancels_the_request() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as impatient:
        with cancels(), raises(openai.APITimeoutError):
            await impatient.chat.completions.create(
                model=given.MODEL,
                messages=question,
                n=32,
                max_tokens=given.ENDLESS_TOKENS,
                extra_body={"ignore_eos": True},
                timeout=1,
            )


keep()
