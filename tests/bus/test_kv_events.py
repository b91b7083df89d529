"""The contract of the stream of KV events."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from nano_inference.bus import Bus
from nano_inference.bus.kv_events import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventEntry,
)
from nano_inference.bus.redis import kv_events as on_redis
from nano_inference.config import ChannelClosed

from ..buses import STORES

BUSES = STORES
STORED = BlockStored((1, 2**64 - 1), None, (5, 6), 1, None, DEVICE, None)


def entry(sequence: int, incarnation: str = "batching-1", lane: str = "0") -> KVEventEntry:
    events = (STORED,) if sequence else (AllBlocksCleared(),)
    return KVEventEntry("", lane, 0, incarnation, sequence, KVEventBatch(1.5, events, 0))


async def published(bus: Bus, *entries: KVEventEntry) -> None:
    for each in entries:
        assert await bus.kv_events.publish(each)


async def read(stream: Any, count: int) -> list[KVEventEntry]:
    return [await anext(stream) for _ in range(count)]


async def test_every_reader_gets_all_entries_in_order(buses: Any) -> None:
    writing, reading = buses.pair()
    streams = [await reading.kv_events.follow() for _ in range(2)]
    entries = [entry(number) for number in range(200)]
    await published(writing, *entries)
    for stream in streams:
        assert await read(stream, 200) == entries
        await stream.aclose()


async def test_a_reader_begins_now_or_with_the_kept_entries(buses: Any) -> None:
    writing, reading = buses.pair()
    await published(writing, entry(0), entry(1))
    kept = await reading.kv_events.follow(kept=True)
    assert await read(kept, 2) == [entry(0), entry(1)]
    late = await reading.kv_events.follow()
    await published(writing, entry(2))
    assert await read(kept, 1) == [entry(2)]
    (first,) = await read(late, 1)
    assert (first.sequence, first.missed) == (2, 2)


async def test_gaps_duplicates_and_restarts_are_seen(buses: Any) -> None:
    writing, reading = buses.pair()
    stream = await reading.kv_events.follow()
    await published(writing, entry(0), entry(1), entry(1), entry(4), entry(5))
    await published(writing, entry(0, lane="1"), entry(0, "batching-2"), entry(1, "batching-2"))
    found = [(e.lane, e.incarnation, e.sequence, e.missed) for e in await read(stream, 7)]
    assert found == [
        ("0", "batching-1", 0, 0),
        ("0", "batching-1", 1, 0),
        ("0", "batching-1", 4, 2),
        ("0", "batching-1", 5, 0),
        ("1", "batching-1", 0, 0),
        ("0", "batching-2", 0, 0),
        ("0", "batching-2", 1, 0),
    ]


async def test_the_stream_is_bounded_and_shows_the_gap_to_a_late_reader(buses: Any) -> None:
    writing = buses.open(kv_events_maxlen=100)
    number = 1000
    await published(writing, *(entry(number) for number in range(number)))
    if buses.on_redis:  # all are written
        await writing.aclose()
    reading = buses.open() if buses.on_redis else writing
    stream = await reading.kv_events.follow(kept=True)
    first = await anext(stream)
    # Redis trims whole nodes of a stream, of 100 entries by default.
    assert number - 300 < first.sequence <= number - 100
    assert first.missed == first.sequence
    rest = await read(stream, number - 1 - first.sequence)
    assert [each.missed for each in rest] == [0] * len(rest)


async def test_closing_ends_readers(buses: Any) -> None:
    bus = buses.open()
    await published(bus, entry(0))
    stream = await bus.kv_events.follow()
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await bus.aclose()
    with pytest.raises(ChannelClosed):
        await waiting
    for attempt in (bus.kv_events.publish(entry(1)), bus.kv_events.follow()):
        with pytest.raises(ChannelClosed):
            await attempt
    left = await buses.open().kv_events.follow()
    left_waiting = asyncio.ensure_future(anext(left))
    await asyncio.sleep(0)
    await left.aclose()
    with pytest.raises(StopAsyncIteration):
        await left_waiting


async def test_entries_beyond_the_limit_are_dropped_while_redis_is_unreachable(
    redis_buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_redis, "MOST_UNWRITTEN", 10)
    reachable = asyncio.Event()
    original = on_redis.execute_all

    async def execute_all(*arguments: Any, **options: Any) -> Any:
        await reachable.wait()
        return await original(*arguments, **options)

    monkeypatch.setattr(on_redis, "execute_all", execute_all)
    bus = redis_buses.open()
    stream = await bus.kv_events.follow()
    taken = [await bus.kv_events.publish(entry(number)) for number in range(30)]
    assert taken == [True] * 10 + [False] * 20, "publishing does not wait"
    reachable.set()
    assert [each.sequence for each in await read(stream, 10)] == list(range(10))
    await published(bus, entry(30))
    (after,) = await read(stream, 1)
    assert (after.sequence, after.missed) == (30, 20)


async def test_a_bus_of_one_model_reads_its_events(redis_buses: Any) -> None:
    bus = redis_buses.open()
    of_model = bus.of_model("b")
    both, one = await bus.kv_events.follow(), await of_model.kv_events.follow()
    entries = [msgspec.structs.replace(entry(0), model=model) for model in ("a", "b")]
    await published(bus, *entries)
    assert await read(both, 2) == entries
    assert await read(one, 1) == entries[1:]
    await of_model.aclose()


async def test_foreign_entries_are_skipped(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    stream = await bus.kv_events.follow()
    key = redis_buses.keys.kv_events.decode()
    await foreign.xadd(key, {"json": "{}"})
    await foreign.xadd(
        key,
        {"model": "", "lane": "0", "replica": "x", "incarnation": "", "sequence": "0", "batch": ""},
    )
    await published(bus, entry(0))
    assert await read(stream, 1) == [entry(0)]


async def test_the_entry_on_redis_is_as_documented(redis_buses: Any) -> None:
    """The names, and the batch's bytes, which other programs read."""
    bus = redis_buses.open()
    removed = BlockRemoved((7,), "CPU")
    batch = KVEventBatch(1.5, (AllBlocksCleared(), STORED, removed), 3)
    await published(bus, KVEventEntry("m", "blue", 3, "batching.3-ab", 0, batch))
    await bus.aclose()
    async with Redis.from_url(redis_buses.url) as redis:
        ((_, fields),) = await redis.xrange(redis_buses.keys.kv_events)
    raw = fields.pop(b"batch")
    assert fields == {
        b"model": b"m",
        b"lane": b"blue",
        b"replica": b"3",
        b"incarnation": b"batching.3-ab",
        b"sequence": b"0",
    }
    assert msgspec.msgpack.decode(raw) == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": [1, 2**64 - 1],
                "parent_block_hash": None,
                "token_ids": [5, 6],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"},
        ],
        3,
    ]
