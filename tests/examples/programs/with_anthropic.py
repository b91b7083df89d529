"""Anthropic's library."""

from __future__ import annotations

import anthropic
import given
from anthropic import Anthropic
from person import Person
from promises import URL, cancels, keep, promise, raises

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {
    "model": given.MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": given.SUM}],
}
GREEDY = {"temperature": 0}
WEATHER = given.WEATHER | {"input_schema": given.CITY}


@promise
def answer_has_text_and_usage() -> None:
    message = client.messages.create(**asked, extra_body=GREEDY)
    assert message.content[0].text == given.TOTAL
    assert message.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=given.MODEL, messages=asked["messages"])
    usage = message.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached
    assert usage.output_tokens > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    with client.messages.stream(**asked, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == whole.content[0].text == given.TOTAL
    assert whole.usage.output_tokens > 0


@promise
def parsed_answer_keeps_its_schema() -> None:
    message = client.messages.parse(
        model=given.MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": given.PERSON}],
        output_format=Person,
    )
    assert isinstance(message.parsed_output, Person)


@promise
def tool_call_is_parsed_and_its_result_taken() -> None:
    messages = [{"role": "user", "content": given.FORECAST}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "auto"}):
        message = client.messages.create(
            model=given.MODEL,
            max_tokens=200,
            messages=messages,
            tools=[WEATHER],
            tool_choice=choice,
            extra_body=GREEDY,
        )
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert call.name == "get_weather"
        assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 21}'}
    answer = client.messages.create(
        model=given.MODEL,
        max_tokens=200,
        messages=[
            *messages,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
        tools=[WEATHER],
        extra_body=GREEDY,
    )
    assert answer.content[0].text


@promise
def models_are_listed_with_the_fields_of_this_client() -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type) == (given.MODEL, "model")
    assert model.display_name
    assert client.models.retrieve(given.MODEL).created_at


@promise
def errors_have_their_classes() -> None:
    long = {"role": "user", "content": given.TOO_LONG}
    with raises(anthropic.BadRequestError, "invalid_request_error", "2048"):
        client.messages.create(model=given.MODEL, max_tokens=200, messages=[long])
    with raises(anthropic.NotFoundError, "not_found_error"):
        client.messages.create(**asked | {"model": "claude"})
    with raises(anthropic.BadRequestError, "invalid_request_error"):
        client.messages.create(**asked, extra_body={"top_p": 7})


@promise
def closing_a_stream_cancels_it() -> None:
    # This interface has no way to go on past the end but an answer that may not end.
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
    with (
        cancels(),
        client.messages.create(
            **asked | {"max_tokens": given.ENDLESS_TOKENS},
            stream=True,
            output_config={"format": {"type": "json_schema", "schema": numbers}},
        ) as stream,
    ):
        next(event for event in stream if event.type == "content_block_delta")


keep()
