"""The contract of a bus as a whole: epochs, ping, and how everything ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nano_inference.bus import Bus, MemoryBus, open_bus
from nano_inference.bus.links import ADMITTED, CREDITS
from nano_inference.config import BusConfig, ChannelClosed, LaneReplaced

from ..buses import kit


async def test_epochs_increase_across_buses(buses: Any) -> None:
    bus, other = buses.pair()
    epochs = [await bus.next_epoch(), await other.next_epoch(), await bus.next_epoch()]
    reopened = await buses.reopen(other)
    epochs.append(await reopened.next_epoch())
    assert epochs[0] >= 1
    assert epochs == sorted(set(epochs))


async def test_the_process_that_started_last_is_the_newest(buses: Any) -> None:
    """Whichever of two that start at once is first to open another stage."""
    older, newer = buses.pair()
    for stage in ("executor", "executor.1"):
        await older.open_inbox(stage)
    await newer.open_inbox("executor")
    assert await newer.is_newest("executor")
    assert await older.is_newest("executor") == (older is newer)
    assert await older.is_newest("executor.1")
    await newer.open_inbox("batching")
    if older is not newer:
        with pytest.raises(LaneReplaced):
            await older.open_inbox("batching")
        assert await newer.is_newest("batching")


async def test_durable_says_whether_another_process_finds_the_entries(buses: Any) -> None:
    bus, another = buses.open(), buses.open()
    await bus.requests.publish({"request_id": "r", "prompt": "x"})
    backlog = await another.requests.backlog()
    assert backlog.waiting == int(bus.durable)
    assert bus.durable == buses.on_redis


async def test_ping(bus: Bus) -> None:
    await bus.ping()


async def test_after_closing_everything_says_so(bus: Bus) -> None:
    inbox = await bus.open_inbox("fairness")
    sender = bus.sender(ADMITTED, "admission-1")
    await bus.aclose()
    await bus.aclose()
    closed = [
        inbox.receive(),
        sender.send(kit.credit(1)),
        bus.requests.publish({"prompt": "x"}),
        bus.requests.take(),
        bus.results.deliver([("r", [kit.done("r", "e")])]),
        bus.results.tail(),
        bus.open_inbox("fairness"),
        bus.next_epoch(),
        bus.ping(),
    ]
    for ended in await asyncio.gather(*closed, return_exceptions=True):
        assert isinstance(ended, ChannelClosed), ended


async def test_closing_ends_all_waits(buses: Any) -> None:
    bus = buses.open(link_capacity=2)
    inbox = await bus.open_inbox("fairness")
    await bus.open_inbox("executor")
    entry = await bus.requests.publish({"request_id": "r", "prompt": "x"})
    await bus.requests.take()
    tail = await bus.results.tail()
    waits = [
        asyncio.create_task(inbox.receive()),
        asyncio.create_task(bus.requests.take()),
        asyncio.ensure_future(anext(tail)),
        asyncio.ensure_future(anext(bus.results.follow("r", entry))),
    ]
    await kit.settled(lambda: sum(wait.done() for wait in waits))
    await bus.aclose()
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(end, ChannelClosed) for end in ended), ended


async def test_messages_sent_before_closing_can_be_received(buses: Any) -> None:
    receiving, sending = buses.pair()
    if sending is not receiving and buses.kind == "redis-local":
        pytest.skip("there a link between two buses is no link: each takes itself for all stages")
    inbox = await receiving.open_inbox("fairness")
    await kit.send_all(sending.sender(CREDITS, "batching-1"), range(300))
    await sending.aclose()
    assert [b.sequences for b in await kit.bodies(inbox, 300)] == list(range(300))


async def test_open_bus_chooses_by_url(redis_url: str) -> None:
    from nano_inference.bus.redis.bus import RedisBus

    memory, redis = open_bus(BusConfig()), open_bus(BusConfig(url=redis_url))
    assert isinstance(memory, MemoryBus)
    assert isinstance(redis, RedisBus)
    await memory.aclose()
    await redis.aclose()
