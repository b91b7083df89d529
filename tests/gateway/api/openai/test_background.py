"""Responses in the background go on without their clients, and without the gateway that began
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from httpx import AsyncClient

from nano_inference.config import BusError
from nano_inference.gateway.api.openai.responses import stored
from nano_inference.gateway.serving.lane_state import Readiness

from ...fake import FakeEngine, app_of, http_of, refused
from ...made import TEXTS, interleaved
from .streamed import response_events
from .test_refusals import refusal

PATH = "/v1/responses"
TEXT = "".join(TEXTS)
BODY: dict[str, Any] = {"input": "hello", "background": True}
KEY = {"Idempotency-Key": "k-1"}
# Soon enough for a test that has to wait for it.
SOON = {"bus.results_ttl_s": 1}


class Deployment:
    """A gateway, as it serves: with what runs beside the connections."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.app = app_of(engine, settings)
        (self.kept,) = self.app.durable_calls()
        self._running = asyncio.create_task(self.app.background["durable calls"]())

    async def aclose(self) -> None:
        """Stop the gateway."""
        self.kept.stopping = True
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.kept.aclose()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        async with http_of(self.app) as client:
            yield client


@asynccontextmanager
async def serving(engine: FakeEngine, **settings: Any) -> AsyncIterator[AsyncClient]:
    deployment = Deployment(engine, **settings)
    async with deployment.client() as client:
        yield client
    await deployment.aclose()


async def begun(http: AsyncClient, **more: Any) -> str:
    """One in the background; where it is."""
    answer = await http.post(PATH, json=BODY | more)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["status"], told["background"], told["output"]) == ("queued", True, [])
    return f"{PATH}/{told['id']}"


async def status(http: AsyncClient, where: str, *wanted: str) -> dict[str, Any]:
    """Return the response when it has one of these statuses."""
    while True:
        found: dict[str, Any] = (await http.get(where)).json()
        if found["status"] in wanted:
            return found
        await anyio.sleep(0.01)


async def test_a_background_response_is_answered_at_once(engine: FakeEngine) -> None:
    engine.hold()
    async with serving(engine) as http, serving(engine) as other:
        where = await begun(http)
        assert (await status(other, where, "in_progress"))["output"] == []
        engine.go()
        told = await status(other, where, "completed")
        assert told["output"][0]["content"][0]["text"] == TEXT
        assert await status(http, where, "completed") == told
    assert engine.names == []


async def test_any_gateway_cancels_a_response(engine: FakeEngine) -> None:
    """The output until then stays, and a second cancellation is no error."""
    engine.hold()
    async with serving(engine) as http, serving(engine) as other:
        where = await begun(http)
        await status(http, where, "in_progress")
        cancelled = (await other.post(f"{where}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"] == TEXT
        assert (await http.post(f"{where}/cancel")).json() == cancelled
        events = response_events(await http.get(f"{where}?stream=true"))
        assert events[-1]["response"] == cancelled


async def test_deleting_ends_a_background_response(engine: FakeEngine) -> None:
    engine.hold()
    async with serving(engine) as http, serving(engine) as other:
        where = await begun(http)
        assert (await other.delete(where)).json()["deleted"]
        await engine.until(lambda: engine.names == ["cancel"])
        for client in (http, other):
            assert refusal(await client.get(where), 404)[0] == "unknown_response"


async def test_an_engine_s_refusal_fails_the_response(engine: FakeEngine) -> None:
    engine.outputs = refused("invalid_max_tokens", "because")
    async with serving(engine) as http:
        where = await begun(http)
        told = await status(http, where, "failed")
        assert told["error"] == {"code": "invalid_max_tokens", "message": "because"}
        events = response_events(await http.get(f"{where}?stream=true"))
        assert events[-1]["response"] == told


# --- that wait for a place --------------------------------------------------------------------


ONE_PLACE = {"gateway.max_in_flight": 2}
"""For each tenant."""


async def test_a_waiting_background_response_is_answered(engine: FakeEngine) -> None:
    engine.hold()
    async with serving(engine, **ONE_PLACE) as http, serving(engine) as other:
        first = await begun(http)
        second = await begun(http)
        for client in (http, other):
            assert (await client.get(second)).json()["status"] == "queued"
        assert len(engine.requests) == 1
        # Whoever reads it waits with it, at any gateway.
        async with asyncio.TaskGroup() as group:
            reading = [
                group.create_task(client.get(f"{second}?stream=true")) for client in (http, other)
            ]
            engine.go()
        events = [response_events(each.result()) for each in reading]
        assert events[0] == events[1]
        assert events[0][-1]["response"]["status"] == "completed"
        await status(http, first, "completed")
    assert len(engine.requests) == 2


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_a_waiting_response_can_be_ended(engine: FakeEngine, way: str) -> None:
    engine.hold()
    async with serving(engine, **ONE_PLACE) as http, serving(engine) as other:
        first, second = [await begun(http) for _ in range(2)]
        if way == "cancel":
            told = (await other.post(f"{second}/cancel")).json()
            assert (told["status"], told["output"]) == ("cancelled", [])
            events = response_events(await other.get(f"{second}?stream=true"))
            assert events[-1]["response"]["status"] == "cancelled"
        else:
            assert (await http.delete(second)).status_code == 200
        engine.go()
        await status(http, first, "completed")
        third = await begun(http)
        await status(http, third, "completed")
    ran = {each.request_id for each in engine.requests}
    # At the other gateway nobody can know that it was ended before it is there.
    ended = {given["request_id"] for name, given in engine.calls if name == "cancel"}
    assert ran - ended == {where.rpartition("/")[2] for where in (first, third)}


async def test_a_response_without_room_is_refused(engine: FakeEngine) -> None:
    engine.hold()
    async with serving(engine, **ONE_PLACE, **{"gateway.max_waiting": 1}) as http:
        await begun(http)
        waits = await begun(http)
        answer = await http.post(PATH, json=BODY, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert (await http.get(waits)).json()["status"] == "queued"
        # Nothing is kept of it, so that it may be sent again.
        engine.go()
        await status(http, waits, "completed")
        assert (await http.post(PATH, json=BODY, headers=KEY)).status_code == 200


async def test_a_response_past_its_deadline_has_failed(engine: FakeEngine) -> None:
    engine.hold()
    async with serving(engine, **ONE_PLACE) as http, serving(engine) as other:
        await begun(http)
        where = await begun(http, budget_ms=200)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(other.get(f"{where}?stream=true"))
            told = await status(other, where, "failed")
        assert told["error"]["code"] == "expired"
        events = response_events(reading.result())
        assert [each["type"].partition(".")[2] for each in events] == [
            "created",
            "queued",
            "in_progress",
            "failed",
        ]
        assert events[-1]["response"] == told
    assert len(engine.requests) == 1


# --- whose gateway is gone --------------------------------------------------------------------


@pytest.mark.parametrize("grace_s", [0.1, 0])
@pytest.mark.parametrize("stopped", [False, True])
async def test_another_gateway_takes_over_a_waiting_response(
    engine: FakeEngine, grace_s: float, stopped: bool
) -> None:
    """Its gateway was killed, or stopped, before there was a place for it."""
    engine.hold()
    settings = {"gateway.resume_grace_s": grace_s, **SOON}
    first = Deployment(engine, **ONE_PLACE, **settings)
    async with first.client() as http:
        ran = await begun(http)
        where = await begun(http)
    if stopped:
        await first.aclose()
    else:
        # Nobody says any more that it attends anything, and its connections say nothing.
        first.kept.stopping = True
        first._running.cancel()
    async with serving(engine, **settings) as other:
        await engine.until(lambda: len(engine.requests) == 2)
        engine.go()
        for each in (ran, where):
            await status(other, each, "completed")
    assert "cancel" not in engine.names


@pytest.mark.parametrize("what", ["follow", "publish"])
async def test_a_response_goes_on_after_a_bus_outage(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(stored, "_BUS_AWAY_S", 0.01)
    away: list[bool] = [True]

    class Away(FakeEngine):
        async def publish(self, *given: Any, **named: Any) -> str:
            if away and what == "publish":
                raise BusError("away")
            return await super().publish(*given, **named)

        async def follow(self, *given: Any, **named: Any) -> Any:
            if away and what == "follow":
                raise BusError("away")
            async for output in super().follow(*given, **named):
                yield output

    engine = Away()
    engine.outputs = interleaved
    async with serving(engine) as http:
        where = await begun(http)
        away.clear()
        await status(http, where, "completed")
    assert len(engine.requests) == 1
    assert "cancel" not in engine.names


async def test_a_gateway_that_is_to_stop_takes_none(engine: FakeEngine) -> None:
    readiness = Readiness(engine.deployment)  # type: ignore[arg-type]
    readiness.draining = True
    async with http_of(app_of(engine, readiness=readiness)) as http:
        for _ in range(2):
            answer = await http.post(PATH, json=BODY, headers=KEY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        readiness.draining = False
        assert (await http.post(PATH, json=BODY, headers=KEY)).json()["status"] == "queued"
