"""A tenant that has stored all it may is refused more, and no other tenant loses anything."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import BusConfig
from nano_inference.store.store import memory_store

from ...errors import error_of
from ...fake import Client, FakeEngine, data_of

ROOM = 64 << 10
LONG = "a" * 1000
SETTINGS: dict[str, Any] = {}
PATH, STREAMED = "/v1/responses", "/v1/completions"

MINE = {"X-Tenant": "mine"}
FLOOD = {"X-Tenant": "flood"}
KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.bus.store = memory_store(BusConfig(calls_max_bytes=ROOM))
    return engine


async def fill(http: Client) -> list[str]:
    """Ids of the responses that were stored until there was no room."""
    stored = []
    while (answer := await http.post(PATH, json={"input": LONG}, headers=FLOOD)).is_success:
        stored.append(answer.json()["id"])
    assert error_of(answer, 429) == "stored_calls_full"
    assert 0 < int(answer.headers["retry-after"]) <= BusConfig().results_ttl_s
    return stored


async def test_a_flood_takes_nothing_from_another_tenant(http: Client) -> None:
    asked = {"input": LONG}
    mine = await http.post(PATH, json=asked, headers=MINE | KEY)
    stored = await fill(http)
    assert len(stored) > 2
    before = len(http.engine.requests)
    assert (await http.get(f"{PATH}/{mine.json()['id']}", headers=MINE)).json() == mine.json()
    again = await http.post(PATH, json=asked, headers=MINE | KEY)
    assert again.json() == mine.json()
    assert len(http.engine.requests) == before
    assert (await http.post(PATH, json=asked, headers=MINE)).is_success
    for response_id in stored:
        assert (await http.get(f"{PATH}/{response_id}", headers=FLOOD)).is_success


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (PATH, {"input": LONG, "stream": True}, {}),
        (PATH, {"input": LONG, "background": True}, {}),
        (PATH, {"input": LONG, "store": False}, {"Idempotency-Key": "other"}),
        (STREAMED, {"prompt": LONG, "n": 2}, {"Idempotency-Key": "other"}),
    ],
)
async def test_calls_that_must_be_stored_are_refused_without_room(
    http: Client, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    await fill(http)
    before = len(http.engine.requests)
    answer = await http.post(path, json=body, headers=FLOOD | headers)
    assert error_of(answer, 429) == "stored_calls_full"
    assert len(http.engine.requests) == before


async def test_a_call_of_a_key_is_found_without_room(http: Client) -> None:
    asked = {"input": LONG}
    first = await http.post(PATH, json=asked, headers=FLOOD | KEY)
    await fill(http)
    assert (await http.post(PATH, json=asked, headers=FLOOD | KEY)).json() == first.json()


async def test_a_deleted_response_makes_room(http: Client) -> None:
    stored = await fill(http)
    assert (await http.delete(f"{PATH}/{stored[0]}", headers=FLOOD)).is_success
    assert (await http.post(PATH, json={"input": LONG}, headers=FLOOD)).is_success
    assert len(await fill(http)) == 0


async def test_calls_that_need_no_room_are_answered(http: Client) -> None:
    """A stream can't be resumed then, and its events have no ids."""
    await fill(http)
    body = {"input": LONG, "store": False}
    assert (await http.post(PATH, json=body, headers=FLOOD)).is_success
    body = {"prompt": [LONG, LONG], "stream": True}
    answer = await http.post(STREAMED, json=body, headers=FLOOD)
    assert "\nid:" not in answer.text
    call_id = data_of(answer)[0]["id"]
    again = await http.get(f"/v1/streams/{call_id}", headers=FLOOD)
    assert error_of(again, 404) == "stream_not_found"
