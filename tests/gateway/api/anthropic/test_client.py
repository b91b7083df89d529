"""Anthropic's library reads what it is sent: messages, streams and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nano_inference.store.loaded_adapter import LoadedAdapter

from ...fake import Client, FakeEngine, refused, report
from ...made import TEXTS, cut, interleaved, whole

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

TEXT = "".join(TEXTS)
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": "tiny", "max_tokens": 9, "messages": HELLO}


async def test_a_message(client: AsyncAnthropic, engine: FakeEngine) -> None:
    engine.outputs = whole
    message = await client.messages.create(system="Be brief.", extra_body={"top_k": 5}, **ASKED)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.cache_read_input_tokens == 3
    assert engine.requests[0].sampling.top_k == 5


async def test_a_stream_is_put_together(client: AsyncAnthropic, engine: FakeEngine) -> None:
    engine.outputs = interleaved
    async with client.messages.stream(**ASKED) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == TEXT
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    assert message.stop_reason == "end_turn"
    assert (message.usage.output_tokens, message.usage.input_tokens) == (3, 1)


async def test_tokens_are_counted(client: AsyncAnthropic) -> None:
    one = await client.messages.count_tokens(model="tiny", messages=HELLO)
    more = await client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.")
    assert 0 < one.input_tokens < more.input_tokens


async def test_models_have_anthropic_s_fields_and_pages(
    client: AsyncAnthropic, engine: FakeEngine
) -> None:
    adapters = tuple(LoadedAdapter(id=id, version=1) for id in "ab")
    engine.stage_reports = [report(adapters=adapters)]
    import anthropic

    page = await client.models.list()
    (model, *_) = page.data
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at.year >= 2026
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "b", False)
    assert [each.id async for each in client.models.list(limit=1)] == ["tiny", "a", "b"]
    before = await client.models.list(limit=1, before_id="b")
    assert ([each.id for each in before.data], before.has_more) == (["a"], True)
    assert (await client.models.retrieve("a")).id == "a"
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        await client.models.retrieve("other")
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "other"}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            await client.models.list(**wrong)  # type: ignore[arg-type]


async def test_models_have_openai_s_fields_for_other_clients(http: Client) -> None:
    assert (await http.get("/v1/models")).json()["object"] == "list"
    assert (await http.get("/v1/models/tiny")).json()["object"] == "model"


async def test_an_error_in_mid_stream_raises(client: AsyncAnthropic, engine: FakeEngine) -> None:
    import anthropic

    no = refused("lane_failed", "because")
    engine.outputs = lambda request: [*cut(request), *no(request)]
    text = ""
    with pytest.raises(anthropic.APIStatusError, match="because") as raised:
        async with client.messages.stream(**ASKED) as stream:
            async for piece in stream.text_stream:
                text += piece
    assert text == TEXTS[0]
    assert raised.value.body["error"]["type"] == "api_error"  # type: ignore[index]
