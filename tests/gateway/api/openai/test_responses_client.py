"""openai-python makes responses, reads them again, goes on with them, and ends them."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from ...fake import FakeEngine
from ...made import LOGPROBS, TEXTS

TEXT = "".join(TEXTS)


async def test_its_helper_puts_a_stream_together(client: AsyncOpenAI) -> None:
    """Which wants the same item in the stream and in its end."""
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


async def test_it_goes_on_behind_an_event(client: AsyncOpenAI) -> None:
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
    assert first.usage is not None
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
    """As its documentation shows."""
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
