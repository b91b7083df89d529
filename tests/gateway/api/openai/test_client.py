"""openai-python reads what it is sent: answers, streams and errors."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from ...fake import FakeEngine, refused
from ...made import LOGPROBS, TEXTS, TOKENS, cut

TEXT = "".join(TEXTS)
HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    logprobs = answer.choices[1].logprobs
    assert [each.logprob for each in logprobs.content or ()] == list(LOGPROBS)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_three_interleaved_choices_are_put_together(client: AsyncOpenAI) -> None:
    """Its helper wants first chunks in the order of their indices, and roles once."""
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, n=3, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 3
    assert answer.usage.completion_tokens == 9


async def test_a_completion_with_fields_of_ours(client: AsyncOpenAI, engine: FakeEngine) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt="a",
        stream=True,
        extra_body={"return_token_ids": True, "top_k": 5},
    )
    token_ids: list[int] = []
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        token_ids += chunk.choices[0].token_ids  # type: ignore[attr-defined]
    assert (text, token_ids) == (TEXT, list(TOKENS))
    assert engine.requests[0].sampling.top_k == 5


async def test_a_field_that_is_refused_is_named(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="tiny", messages=HELLO, modalities=["audio"])
    assert (raised.value.param, raised.value.code) == ("modalities", "unsupported")


async def test_expired_calls_are_not_retried(client: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.outputs = refused("expired")
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=2).chat.completions.create(
            model="tiny", messages=HELLO
        )
    assert len(engine.requests) == 1


async def test_an_error_in_mid_stream_raises(client: AsyncOpenAI, engine: FakeEngine) -> None:
    no = refused("lane_failed", "because")
    engine.outputs = lambda request: [*cut(request), *no(request)]
    text = ""
    with pytest.raises(openai.APIError, match="because") as raised:
        async for chunk in await client.completions.create(model="tiny", prompt="a", stream=True):
            text += chunk.choices[0].text
    assert text == TEXTS[0]
    assert (raised.value.code, raised.value.type) == ("lane_failed", "server_error")


async def test_the_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "nano-inference"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


# --- responses ------------------------------------------------------------------------------------


async def test_its_helper_puts_a_stream_together(client: AsyncOpenAI) -> None:
    """The helper requires the same item in the stream and at its end."""
    for background in (False, True):
        async with client.responses.stream(
            model="tiny",
            input="hello",
            background=background,
            include=["message.output_text.logprobs"],
        ) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert response.output_text == TEXT
        (content,) = response.output[0].content  # type: ignore[union-attr]
        assert [each.logprob for each in content.logprobs] == list(LOGPROBS)  # type: ignore[union-attr]


async def test_input_tokens_are_those_of_the_prompt(
    client: AsyncOpenAI, engine: FakeEngine
) -> None:
    first = await client.responses.create(model="tiny", input="hello")
    asked: list[dict[str, Any]] = [
        {"input": "hello"},
        {"input": "hello", "instructions": "Be brief."},
        {"input": "more", "previous_response_id": first.id},
    ]
    for body in asked:
        counted = await client.responses.input_tokens.count(model="tiny", **body)
        before = len(engine.requests)
        await client.responses.create(model="tiny", **body)
        (request,) = engine.requests[before:]
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == len(request.prompt_token_ids or ())
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        await client.responses.input_tokens.count(model="other", input="hello")


async def test_a_stream_resumes_after_an_event(client: AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    response_id = events[0].response.id  # type: ignore[union-attr]
    rest = await client.responses.retrieve(response_id, stream=True, starting_after=4)
    assert [event async for event in rest] == events[5:]
    async with client.responses.stream(response_id=response_id, starting_after=4) as again:
        numbers = [event.sequence_number async for event in again]
        response = await again.get_final_response()
    assert numbers == list(range(5, len(events)))
    assert response.output_text == TEXT


async def test_a_conversation_in_turns(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="hello", instructions="Be brief.")
    assert (first.output_text, first.usage.output_tokens) == (TEXT, 3)
    second = await client.responses.create(
        model="tiny", input="and?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    items: list[Any] = [
        item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)
    ]
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "hello"),
        ("assistant", TEXT),
        ("user", "and?"),
    ]
    assert (await client.responses.retrieve(second.id)).output_text == TEXT
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


async def polled(client: AsyncOpenAI, response: Response) -> Response:
    """Poll as the client's documentation shows."""
    while response.status in ("queued", "in_progress"):
        await anyio.sleep(0.01)
        response = await client.responses.retrieve(response.id)
    return response


async def test_a_background_response(client: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.hold()
    first, second = [
        await client.responses.create(model="tiny", input="hello", background=True)
        for _ in range(2)
    ]
    assert first.status == "queued"
    for _ in range(2):
        cancelled = await client.responses.cancel(second.id)
        assert (cancelled.status, cancelled.id) == ("cancelled", second.id)
    engine.go()
    made = await polled(client, first)
    assert (made.status, made.output_text) == ("completed", TEXT)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(made.id)
