"""`/v1/conversations`: kept by name, continued by responses, each tenant's own."""

from __future__ import annotations

import asyncio

import anyio.lowlevel
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from nano_inference.config import Config
from nano_inference.store.calls import CALL_BYTES
from nano_inference.store.store import memory_store

from ...errors import error_of
from ...fake import Client, FakeEngine, app_of, http_of, poster
from ...saying import Model
from .streamed import response_events
from .test_refusals import refusal

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
USER = {"type": "message", "role": "user", "content": "a"}

posted = poster(RESPONSES, {})
made = poster(PATH, {})


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


async def texts(http: Client, conversation_id: str) -> list[str]:
    listed = (await http.get(f"{PATH}/{conversation_id}/items?order=asc&limit=100")).json()
    return [item["content"][0]["text"] for item in listed["data"]]


async def test_openai_s_library_manages_conversations(client: AsyncOpenAI) -> None:
    conversation = await client.conversations.create(
        metadata={"a": "b"}, items=[{"type": "message", "role": "user", "content": "one"}]
    )
    assert conversation.id.startswith("conv_")
    assert conversation.metadata == {"a": "b"}
    assert await client.conversations.retrieve(conversation.id) == conversation
    changed = await client.conversations.update(conversation.id, metadata={"c": "d"})
    assert (changed.metadata, changed.created_at) == ({"c": "d"}, conversation.created_at)
    items = client.conversations.items
    added = await items.create(
        conversation.id,
        items=[
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "two"},
        ],
    )
    assert [each.type for each in added.data] == ["function_call", "function_call_output"]
    listed = [each async for each in items.list(conversation.id, order="asc", limit=1)]
    assert [each.type for each in listed] == ["message", "function_call", "function_call_output"]
    last = listed[-1]
    assert last.id
    assert await items.retrieve(last.id, conversation_id=conversation.id) == last
    assert await items.delete(last.id, conversation_id=conversation.id) == changed
    assert len([each async for each in items.list(conversation.id)]) == 2
    assert (await client.conversations.delete(conversation.id)).deleted


async def test_responses_continue_a_conversation_and_add_to_it_at_any_gateway(
    http: Client, other: Client, model: Model
) -> None:
    name = (await made(http, items=[USER]))["id"]
    model.says("b")
    first = await posted(http, input="c", conversation=name)
    assert first["conversation"] == {"id": name}
    assert await texts(other, name) == ["a", "c", "b"]
    model.says("d")
    body = {"input": "e", "conversation": {"id": name}, "stream": True, "store": False}
    last = response_events(await other.post(RESPONSES, json=body))[-1]["response"]
    assert last["conversation"] == {"id": name}
    turns = ("user\na", "user\nc", "assistant\nb", "user\ne")
    assert (
        model.prompt()
        == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    )
    model.says("f")
    begun = await posted(http, input=[], conversation=name, background=True)
    where = f"{RESPONSES}/{begun['id']}"
    while (await other.get(where)).json()["status"] != "completed":
        await anyio.lowlevel.checkpoint()
    # However often a response is read, it is there once.
    await http.get(where)
    assert await texts(http, name) == ["a", "c", "b", "e", "d", "f"]
    listed = await http.get(f"{PATH}/{name}/items/{last['output'][0]['id']}")
    assert listed.json()["content"][0]["text"] == "d"
    assert refusal(await http.get(f"{PATH}/{name}/items/x"), 404)[0] == "unknown_item"
    assert refusal(await http.delete(f"{PATH}/{name}/items/x"), 404)[0] == "unknown_item"


async def test_a_response_that_did_not_end_well_adds_nothing(http: Client, model: Model) -> None:
    name = (await made(http, items=[USER]))["id"]
    model.says("b", reason="abort")
    assert (await posted(http, input="c", conversation=name))["status"] == "cancelled"
    assert await texts(http, name) == ["a"]


async def test_additions_at_once_are_all_kept(http: Client, other: Client, model: Model) -> None:
    name = (await made(http))["id"]
    where = f"{PATH}/{name}/items"
    added = [{"items": [USER | {"content": str(number)}]} for number in range(12)]
    answers = await asyncio.gather(
        *((http, other)[place % 2].post(where, json=each) for place, each in enumerate(added))
    )
    assert [each.status_code for each in answers] == [200] * 12
    assert sorted(map(int, await texts(http, name))) == list(range(12))


async def test_a_conversation_is_its_tenant_s_and_ends_with_its_deletion(
    http: Client, model: Model
) -> None:
    name = (await made(http, items=[USER]))["id"]
    foreign = {"X-Tenant": "b"}
    where = f"{PATH}/{name}"
    body = {"conversation": name, "input": "c"}
    for method, path, given in (
        ("GET", where, None),
        ("POST", where, {"metadata": {}}),
        ("DELETE", where, None),
        ("GET", f"{where}/items", None),
        ("POST", f"{where}/items", {"items": [USER]}),
        ("POST", RESPONSES, body),
    ):
        answer = await http.request(method, path, json=given, headers=foreign)
        assert refusal(answer, 404) == ("unknown_conversation", None), (method, path)
    model.engine.hold()
    model.says("b")
    running = asyncio.create_task(http.post(RESPONSES, json=body | {"stream": True}))
    await model.engine.until(lambda: len(model.requests) == 1)
    assert (await http.delete(where)).json() == {
        "id": name,
        "object": "conversation.deleted",
        "deleted": True,
    }
    model.engine.go()
    assert response_events(await running)[-1]["type"] == "response.completed"
    assert refusal(await http.get(where), 404)[0] == "unknown_conversation"
    assert refusal(await http.delete(where), 404)[0] == "unknown_conversation"


async def test_a_conversation_takes_room_of_stored_calls(
    engine: FakeEngine, calling: Config
) -> None:
    bus = replace(calling.bus, calls_max_bytes=32 * CALL_BYTES, max_request_bytes=4 * CALL_BYTES)
    engine.bus.store = memory_store(bus)
    async with http_of(app_of(engine, replace(calling, bus=bus)), engine) as http:
        where = f"{PATH}/{(await made(http))['id']}"
        # Only the last version takes room, of which a tenant alone has half.
        for _ in range(32):
            assert (await http.post(where, json={"metadata": {"a": "b"}})).status_code == 200
        large = {"items": [USER | {"content": "a" * 5 * CALL_BYTES}]}
        assert refusal(await http.post(PATH, json=large), 413)[0] == "request_too_large"
        answers = [await http.post(PATH, json={}) for _ in range(17)]
        assert error_of(answers[-1], 429) == "stored_calls_full"


async def test_what_can_not_be_a_conversation(http: Client) -> None:
    for body, param in (
        ({"items": [{"type": "telepathy"}]}, "items[0]"),
        (
            {"items": [{"type": "function_call_output", "call_id": "a", "output": ""}]},
            "items[0].call_id",
        ),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"input": "a"}, "input"),
    ):
        assert refusal(await http.post(PATH, json=body))[1] == param
