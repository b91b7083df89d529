"""A request whose caller leaves is cancelled, however long that takes and however many leave."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from nano_inference.bus import open_bus
from nano_inference.config import BusConfig
from nano_inference.pipeline import cancellations
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.stage_control import SharedCall

LIMIT_S = 30


async def test_a_thousand_who_look_at_once_cost_two_looks() -> None:
    begun = 0
    started, go = asyncio.Event(), asyncio.Event()

    async def look() -> int:
        nonlocal begun
        begun += 1
        number = begun
        started.set()
        await go.wait()
        return number

    looks = SharedCall(look)
    first = asyncio.create_task(looks.result())
    await started.wait()
    # What the first one sees may be older than their question.
    others = [asyncio.create_task(looks.result()) for _ in range(1000)]
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(LIMIT_S):
        assert await first == 1
        assert set(await asyncio.gather(*others)) == {2}
        assert await looks.result() == 3


async def test_who_leaves_takes_nobody_elses_look_along() -> None:
    go = asyncio.Event()
    looks = SharedCall(go.wait)
    impatient, patient = (asyncio.create_task(looks.result()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(LIMIT_S):
        assert await patient is True
    assert impatient.cancelled()


async def test_a_cancellation_that_takes_long_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellations, "CANCEL_PATIENCE_S", 0.01)
    bus = open_bus(BusConfig())
    client = BusClient(bus)
    go, cancelled = asyncio.Event(), []

    async def cancel(request_id: str, entry_id: str = "") -> None:
        await go.wait()
        cancelled.append((request_id, entry_id))

    monkeypatch.setattr(client, "cancel", cancel)
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(client.submit({"prompt": "x", "request_id": "mine"})) as outputs:
            asking = asyncio.ensure_future(anext(outputs))
            (entry,) = await bus.requests.take(1)
            asking.cancel()
            await asyncio.wait([asking])
        assert not cancelled
        go.set()
        await client.aclose()
    assert cancelled == [("mine", entry.entry_id)]
    await bus.aclose()


async def test_who_leaves_while_he_publishes_is_cancelled_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellations, "CANCEL_PATIENCE_S", 0.01)
    bus = open_bus(BusConfig())
    client = BusClient(bus)
    begun, go, cancelled = asyncio.Event(), asyncio.Event(), []

    async def publish(request: object, trace: object = None) -> str:
        begun.set()
        await go.wait()
        return "7-0"

    async def cancel(request_id: str, entry_id: str = "") -> None:
        cancelled.append((request_id, entry_id))

    monkeypatch.setattr(client, "publish", publish)
    monkeypatch.setattr(client, "cancel", cancel)
    async with asyncio.timeout(LIMIT_S):
        asking = asyncio.ensure_future(client.complete({"prompt": "x"}))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert not cancelled
        go.set()
        await client.aclose()
    assert cancelled == [("7-0", "7-0")]
    await bus.aclose()
