"""A lane's record of its weights, on every kind of bus."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from nano_inference.bus import Bus
from nano_inference.store.in_place import AdapterInPlace, AdaptersInPlace, WeightsInPlace
from nano_inference.store.redis.keys import Keys

from ..buses import STORES

BUSES = STORES

SEVEN = WeightsInPlace(version=7, leader="admission-1", folder="/weights/7", stamp="abc")
EIGHT = WeightsInPlace(version=8, leader="admission-1")


async def test_the_last_word_counts(bus: Bus) -> None:
    assert await bus.store.weights.read() is None
    for weights in (SEVEN, EIGHT):
        await bus.store.weights.put(weights)
        assert await bus.store.weights.read() == weights


async def test_of_adapters_too(bus: Bus) -> None:
    assert await bus.store.adapters.read() is None
    last = AdaptersInPlace(
        leader="admission-1",
        adapters=(AdapterInPlace("a", 3, "/adapters/a", "abc"), AdapterInPlace("b", 1)),
        versions={"a": 3, "b": 1, "gone": 2},
    )
    await bus.store.adapters.put(last)
    assert await bus.store.adapters.read() == last
    assert await bus.store.weights.read() is None


async def test_each_lane_has_its_own(redis_buses: Any) -> None:
    bus, same, other = redis_buses.open(), redis_buses.open(), redis_buses.open(lane="1")
    await bus.store.weights.put(SEVEN)
    assert await same.store.weights.read() == SEVEN
    assert await other.store.weights.read() is None


async def test_unreadable_records_are_ignored(redis_buses: Any) -> None:
    """A later version may write such records."""
    bus = redis_buses.open()
    async with Redis.from_url(redis_buses.url) as redis:
        for raw in (b"", b"{", b"[]", b'{"version":"x"}', b"\xff"):
            await redis.set(Keys(redis_buses.prefix).weights, raw)
            assert await bus.store.weights.read() is None
    await bus.store.weights.put(EIGHT)
    assert await bus.store.weights.read() == EIGHT
