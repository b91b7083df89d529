"""A call is ended by its answer's id, and one that nobody reads does not grow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ...fake import Client
from .streamed import Recorded, stream_of

COMPLETIONS = "/v1/completions"
TEXT: dict[str, Any] = {"prompt": "98 +", "stream": True}
MINE = {"X-Tenant": "me"}


# A tenant has one place. The engine makes up texts, of which its tokens know nothing.
SETTINGS = {"gateway.max_in_flight": 2, "gateway.message_format": "off"}


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/cancel")])
@pytest.mark.parametrize("prompts", ["a", ["a", "b", "c"]])
async def test_a_call_is_ended_at_any_gateway(
    http: Client, other: Client, method: str, path: str, prompts: Any
) -> None:
    """A request that waits for a slot at the first gateway is never started."""
    http.engine.hold()
    async with asyncio.TaskGroup() as group:
        body = TEXT | {"prompt": prompts}
        call = group.create_task(http.post(COMPLETIONS, json=body, headers=MINE))
        await http.engine.until(lambda: len(http.engine.requests) == 1)
        call_id = http.engine.requests[0].request_id.partition("_")[0]
        url = f"/v1/streams/{call_id}{path}"
        for headers in ({}, {"X-Tenant": "other"}):
            answer = await other.request(method, url, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")
        assert "cancel" not in http.engine.names
        answer = await other.request(method, url, headers=MINE)
        assert (answer.status_code, answer.json()["cancelled"]) == (200, True)
    begun = stream_of(call.result())
    reasons = [each["reasons"] for each in Recorded(begun).choices.values()]
    assert reasons == [["abort"]] * len(prompts)
    # The second one was published before anybody could tell its gateway, and ended at once.
    assert len(http.engine.requests) <= 2
    published = len(http.engine.requests)
    again = stream_of(await other.get(f"/v1/streams/{call_id}", headers=MINE))
    assert [each["reasons"] for each in Recorded(again).choices.values()] == reasons
    assert len(http.engine.requests) == published


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/cancel")])
async def test_an_unknown_call_is_not_found(http: Client, method: str, path: str) -> None:
    answer = await http.request(method, f"/v1/streams/cmpl-0{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


async def test_a_call_is_ended_by_its_key(http: Client, other: Client) -> None:
    """A client that has no event yet, and so no id, can end it; another tenant can't."""
    http.engine.hold()
    mine = MINE | {"Idempotency-Key": "k"}
    async with asyncio.TaskGroup() as group:
        call = group.create_task(http.post(COMPLETIONS, json=TEXT, headers=mine))
        await http.engine.until(lambda: len(http.engine.requests) == 1)
        foreign = await other.delete("/v1/streams", headers={"Idempotency-Key": "k"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "stream_not_found")
        nameless = await other.delete("/v1/streams", headers=MINE)
        assert nameless.json()["error"]["code"] == "invalid_idempotency_key"
        answer = await other.delete("/v1/streams", headers=mine)
        assert answer.json()["id"] == http.engine.requests[0].request_id
    assert Recorded(stream_of(call.result())).choices[0]["reasons"] == ["abort"]
