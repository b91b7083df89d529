"""`/v1/responses`: answers, and responses that are found, continued and ended at any gateway."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from httpx import AsyncClient, Response

from nano_inference.config import BusError

from ... import by_hand
from ...fake import Client, FakeEngine, app_of, completion, http_of, poster, refused
from ...made import TEXTS, cut, told, whole
from .streamed import response_event, response_events
from .test_refusals import refusal

PATH = "/v1/responses"
TEXT = "".join(TEXTS)
HELLO: dict[str, Any] = {"input": "hello"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
MINE = {"X-Tenant": "me"}
KEY = {"Idempotency-Key": "k-1"}


SETTINGS: dict[str, Any] = {}

posted = poster(PATH, HELLO)


async def got(http: AsyncClient, response_id: str, more: str = "") -> dict[str, Any]:
    answer = await http.get(f"{PATH}/{response_id}{more}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_an_answer_has_openai_s_fields(http: Client) -> None:
    answer = await posted(http, instructions="Be brief.", metadata={"a": "b"})
    (request,) = http.engine.requests
    assert answer["id"] == request.request_id
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 4 + 3
    assert (answer["instructions"], answer["metadata"]) == ("Be brief.", {"a": "b"})


async def test_the_finish_reason_sets_the_status(http: Client) -> None:
    http.engine.outputs = lambda request: [completion(request)]
    answer = await posted(http)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    http.engine.outputs = lambda request: [
        completion(request, told(request, 0, "abort"), status="cancelled")
    ]
    assert (await posted(http))["status"] == "cancelled"


# --- read again -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_any_gateway_returns_the_same_response(
    http: Client, other: Client, stream: bool
) -> None:
    answer = await http.post(PATH, json=HELLO | LOGPROBS | {"stream": stream})
    made = response_events(answer)[-1]["response"] if stream else answer.json()
    for client in (http, other):
        assert await got(client, made["id"]) == made
        assert await got(client, made["id"], "?stream=false&include[]=x") == made
    assert len(http.engine.requests) == 1


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"background": True}])
async def test_another_gateway_resumes_after_each_event(
    http: Client, other: Client, more: dict[str, Any]
) -> None:
    """By number, by the event's id, and by the same POST again, which publishes nothing."""
    body = HELLO | more | {"stream": True}
    events = response_events(await http.post(PATH, json=body))
    response_id = events[0]["response"]["id"]
    where = f"{PATH}/{response_id}?stream=true"
    for number in range(-1, len(events)):
        rest = events[number + 1 :]
        last = {"Last-Event-ID": f"{response_id}.{number}"}
        answers = [await other.get(where)] if number < 0 else [
            await other.get(f"{where}&starting_after={number}"),
            await other.get(f"/v1/streams/{response_id}?after={response_id}.{number}"),
            await other.get(where, headers=last),
            await other.post(PATH, json=body, headers=last),
        ]  # fmt: skip
        for answer in answers:
            assert response_events(answer, number + 1) == rest
    assert len(http.engine.requests) == 1


async def test_a_response_can_be_streamed_later(http: Client) -> None:
    http.engine.outputs = whole
    made = await posted(http)
    events = response_events(await http.get(f"{PATH}/{made['id']}?stream=true"))
    (delta,) = (each["delta"] for each in events if each["type"] == "response.output_text.delta")
    assert (delta, events[-1]["response"]) == (TEXT, made)


async def test_a_failed_response_stays_failed(http: Client, other: Client) -> None:
    no = refused("lane_failed", "because")
    http.engine.outputs = lambda request: [*cut(request), *no(request)]
    events = response_events(await http.post(PATH, json=HELLO | {"stream": True}))
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]) == (
        "failed",
        {"code": "lane_failed", "message": "because"},
    )
    assert await got(other, failed["id"]) == failed
    where = f"{PATH}/{failed['id']}?stream=true"
    assert response_events(await other.get(where)) == events
    # Also when nothing had come before.
    http.engine.outputs = no
    assert [each["type"] for each in response_events(await other.get(where))] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


async def test_resuming_after_an_interruption_misses_nothing(http: Client, other: Client) -> None:
    """The bus was away for a moment: the response has not failed by that."""
    http.engine.away = True
    answer = await http.post(PATH, json=HELLO | {"stream": True})
    *begun, last = answer.text.split("\n\n")[:-1]
    events = [response_event(part, number) for number, part in enumerate(begun)]
    assert "event: error" in last
    assert f".{len(events) - 1}\n" in last
    http.engine.away = False
    response_id = events[0]["response"]["id"]
    after = f"?stream=true&starting_after={len(events) - 1}"
    rest = response_events(await other.get(f"{PATH}/{response_id}{after}"), len(events))
    deltas = [each.get("delta", "") for each in [*events, *rest]]
    assert "".join(deltas) == TEXT
    assert "cancel" not in http.engine.names


QUERIES = [
    ("?stream=perhaps", "invalid_request", "stream"),
    ("?starting_after=5", "invalid_request", "starting_after"),
    ("?stream=true&starting_after=-1", "invalid_request", "starting_after"),
    ("?stream=true&starting_after=x", "invalid_request", "starting_after"),
    ("?x=1", "unsupported", "x"),
    ("/input_items?order=up", "invalid_request", "order"),
    ("/input_items?limit=0", "invalid_request", "limit"),
    ("/input_items?limit=101", "invalid_request", "limit"),
    ("/input_items?after=x", "invalid_request", "after"),
    ("/input_items?x=1", "unsupported", "x"),
]


@pytest.mark.parametrize(("query", "code", "param"), QUERIES)
async def test_invalid_queries_are_refused_by_name(
    http: Client, query: str, code: str, param: str
) -> None:
    made = await posted(http)
    assert refusal(await http.get(f"{PATH}/{made['id']}{query}")) == (code, param)


async def test_an_event_of_no_response_is_refused(http: Client) -> None:
    made = await posted(http)
    for event_id in ("nonsense", made["id"], f"{made['id']}.x", "cmpl-1.5", "resp_0.5"):
        answer = await http.get(
            f"{PATH}/{made['id']}?stream=true", headers={"Last-Event-ID": event_id}
        )
        assert refusal(answer)[0] == "invalid_event_id"


async def test_other_tenants_and_keys_find_no_response(http: Client, other: Client) -> None:
    """Another tenant's, what was not stored, what another version wrote, and what never was."""
    mine = (await http.post(PATH, json=HELLO, headers=MINE)).json()
    unstored = await posted(http, store=False)
    keyed = (await http.post(PATH, json=HELLO | {"store": False}, headers=KEY)).json()
    await http.engine.bus.store.calls.keep("resp_1", b"\x81\xa4call\x01", 1)
    for response_id in (mine["id"], unstored["id"], keyed["id"], "resp_1", "resp_0"):
        where = f"{PATH}/{response_id}"
        for answer in (
            await other.get(where),
            await other.get(f"{where}?stream=true"),
            await other.delete(f"/v1/streams/{response_id}"),
            await other.get(f"{where}/input_items"),
            await other.delete(where),
            await other.post(f"{where}/cancel"),
        ):
            assert refusal(answer, 404) == ("unknown_response", None)
    assert "cancel" not in http.engine.names
    assert await http.engine.bus.store.calls.read(unstored["id"]) is None


async def test_a_response_without_results_is_not_found(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any, **__: Any) -> Any:
        raise BusError("gone", code="unknown_request")

    made = await posted(http)
    monkeypatch.setattr(http.engine.bus.results, "last", gone)
    monkeypatch.setattr(FakeEngine, "_made", by_hand.ignore)
    assert refusal(await http.get(f"{PATH}/{made['id']}"), 404)[0] == "unknown_response"


async def test_a_response_is_stored_until_it_is_deleted(http: Client, other: Client) -> None:
    made = (await http.post(PATH, json=HELLO, headers=KEY)).json()
    where = f"{PATH}/{made['id']}"
    gone = await other.delete(where)
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    for again in (await http.get(where), await http.delete(where), await other.get(where)):
        assert refusal(again, 404) == ("unknown_response", None)
    assert await http.engine.bus.store.calls.read(made["id"]) is None
    # And its key with it.
    assert (await http.post(PATH, json=HELLO, headers=KEY)).json()["id"] != made["id"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}, {"store": False}])
async def test_the_same_call_with_its_key_is_made_once(
    http: Client, other: Client, fields: dict[str, Any]
) -> None:
    answers = [await each.post(PATH, json=HELLO | fields, headers=KEY) for each in (http, other)]
    assert len(http.engine.requests) == 1
    if fields.get("background"):
        assert [each.json()["status"] for each in answers] == ["queued", "completed"]
    else:
        assert answers[0].text == answers[1].text
    changed = await other.post(PATH, json=HELLO | fields | {"seed": 1}, headers=KEY)
    assert refusal(changed, 422)[0] == "idempotency_key_reused"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    crossed = await other.post("/v1/chat/completions", json=chat, headers=KEY)
    assert refusal(crossed, 422)[0] == "idempotency_key_reused"


# --- while it runs ----------------------------------------------------------------------------


@asynccontextmanager
async def held(http: Client) -> AsyncIterator[tuple[Task[Response], str]]:
    """A response that has begun, while it is made; and its id."""
    http.engine.hold()
    async with asyncio.TaskGroup() as group:
        making = group.create_task(http.post(PATH, json=HELLO))
        await http.engine.until(lambda: len(http.engine.requests) == 1)
        yield making, http.engine.requests[0].request_id


async def test_only_background_responses_can_be_cancelled(http: Client) -> None:
    async with held(http) as (making, response_id):
        assert (await got(http, response_id))["status"] in ("queued", "in_progress")
        cancel = f"{PATH}/{response_id}/cancel"
        assert refusal(await http.post(cancel)) == ("invalid_request", None)
        http.engine.go()
        assert (await making).json()["status"] == "completed"
        assert refusal(await http.post(cancel)) == ("invalid_request", None)
    assert http.engine.names == []


async def test_any_is_ended_as_a_stream_is(http: Client) -> None:
    async with held(http) as (making, response_id):
        assert (await http.delete(f"/v1/streams/{response_id}")).json()["cancelled"]
        made = (await making).json()
        assert made["status"] == "cancelled"
        assert await got(http, response_id) == made


async def test_a_waiting_client_gets_a_deleted_response(http: Client) -> None:
    async with held(http) as (making, response_id):
        where = f"{PATH}/{response_id}"
        assert (await http.delete(where)).json()["deleted"]
        http.engine.go()
        assert (await making).json()["status"] == "completed"
        assert refusal(await http.get(where), 404)[0] == "unknown_response"


# --- conversations ----------------------------------------------------------------------------


async def test_the_conversation_so_far_precedes_the_input(http: Client, other: Client) -> None:
    """All earlier responses count, without their instructions, and also after their removal."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "user", "content": parts}, {"role": "developer", "content": "c"}]
    first = await posted(http, input=items, instructions="Be brief.", **LOGPROBS)
    second = await posted(other, input="d", previous_response_id=first["id"])
    assert (await other.delete(f"{PATH}/{first['id']}")).status_code == 200
    third = await posted(
        http, input="e", instructions="Be long.", previous_response_id=second["id"]
    )
    assert third["previous_response_id"] == second["id"]
    messages = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "a\nb"},
        {"role": "developer", "content": "c"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "e"},
    ]
    await http.post("/v1/chat/completions", json={"messages": messages})
    assert http.engine.requests[2].prompt_token_ids == http.engine.requests[3].prompt_token_ids
    listed = await got(other, third["id"], "/input_items?order=asc")
    ids = [item["id"] for item in listed["data"]]
    assert [item["role"] for item in listed["data"]] == [each["role"] for each in messages[1:]]
    assert ids[2] == first["output"][0]["id"]
    assert listed["data"][0]["content"] == parts
    assert listed["data"][2]["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": []}
    ]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[-1], False)
    page = await got(http, third["id"], f"/input_items?limit=2&after={ids[4]}")
    assert [item["id"] for item in page["data"]] == [ids[3], ids[2]]
    assert page["has_more"]


async def test_a_failed_response_can_not_be_continued(http: Client) -> None:
    http.engine.hold()
    begun = await posted(http, background=True)
    following = HELLO | {"previous_response_id": begun["id"]}
    for _ in range(2):
        answer = await http.post(PATH, json=following)
        param = "previous_response_id"
        assert refusal(answer) == ("previous_response_unfinished", param)
        await http.post(f"{PATH}/{begun['id']}/cancel")
    answer = await http.post(PATH, json=following, headers=MINE)
    assert refusal(answer) == ("previous_response_not_found", param)
    assert len(http.engine.requests) == 1


async def test_a_response_cut_by_its_length_can_be_continued(http: Client) -> None:
    http.engine.outputs = lambda request: [completion(request)]
    first = await posted(http)
    assert first["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await posted(http, previous_response_id=first["id"]))["status"] == "incomplete"


async def test_a_stored_conversation_is_bounded(engine: FakeEngine) -> None:
    async with http_of(app_of(engine, {"bus.max_request_bytes": 700})) as http:
        body = {"input": "a", "metadata": {"a": "b" * 500}}
        assert refusal(await http.post(PATH, json=body), 413) == ("request_too_large", "input")
        assert (await http.post(PATH, json=body | {"store": False})).status_code == 200
    assert len(engine.requests) == 1
