"""A call is ended by its answer's id, and one that nobody reads does not grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

from nano_inference.bus.public import Completion, Output
from nano_inference.config import Config
from nano_inference.gateway.serving.samples import MOST_UNSENT

from ... import by_hand
from ...fake import Client, FakeEngine, app_of, http_of
from ...made import chunk, interleaved
from .streamed import Recorded, events, stream_of

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
    """What waits for a place at the first one is not begun any more."""
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


@pytest.mark.parametrize(
    ("path", "body", "told_as"),
    [
        (COMPLETIONS, TEXT, "five"),
        ("/v1/responses", {"input": "a", "stream": True}, '"delta":"five"'),
    ],
)
async def test_unread_outputs_wait_on_the_bus(
    config: Config, path: str, body: dict[str, Any], told_as: str
) -> None:
    """Others are served meanwhile, and when it reads it gets all of it."""
    number = 3 * MOST_UNSENT

    class Long(FakeEngine):
        taken = 0

        async def follow(self, request_id: str, *_: Any, **__: Any) -> AsyncIterator[Output]:  # type: ignore[override]
            (request,) = (each for each in self.requests if each.request_id == request_id)
            short = request.tenant == "other"
            for place in range(0 if short else number):
                self.taken += 1
                first = msgspec.structs.replace(chunk(request, 0, 0), token_offset=place)
                yield first
            for output in interleaved(request):
                if short or isinstance(output, Completion):
                    yield output

    engine = Long()
    app = app_of(engine, config)
    reads, parts = anyio.Event(), []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()
            parts.append(message["body"])

    async with anyio.create_task_group() as group:
        group.start_soon(by_hand.post, app, path, body, send)
        await engine.until(lambda: len(engine.requests) == 1)
        await anyio.wait_all_tasks_blocked()
        assert MOST_UNSENT <= engine.taken <= MOST_UNSENT + 2
        async with http_of(app) as another:
            answer = await another.post(COMPLETIONS, json=TEXT, headers={"X-Tenant": "other"})
            assert len(events(answer)) > 0
        assert engine.taken <= MOST_UNSENT + 2
        reads.set()
    assert engine.taken == number
    text = b"".join(parts).decode()
    assert text.count(told_as) == number
