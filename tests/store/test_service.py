"""The service of each lane, on every kind of bus."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from nano_inference.bus import Bus
from nano_inference.store.redis.keys import Keys
from nano_inference.store.service import LaneService

from ..buses import STORES

BUSES = STORES

A = LaneService("a", 7, 0, ((0, "gold", 12.5), (-1, "ü:", 3.0)))
B = LaneService("b", 9, 2)


async def test_each_lane_replaces_its_own_table(bus: Bus) -> None:
    service = bus.store.service
    assert await service.exchange(A) == []
    assert await service.exchange(B) == [A]
    newer = LaneService("a", 8, 0)
    assert sorted(await service.exchange(newer), key=lambda each: each.lane) == [A, B]
    await service.forget(["b", "none"])
    await service.forget([])
    assert await service.exchange(None) == [newer]
    assert await service.exchange(None) == [newer]


async def test_tables_are_of_one_model_and_expire(redis_buses: Any) -> None:
    bus, other = redis_buses.open(), redis_buses.open(model="m")
    await bus.store.service.exchange(A)
    assert await other.store.service.exchange(B) == []
    key = Keys(redis_buses.prefix).service
    async with Redis.from_url(redis_buses.url) as redis:
        assert await redis.ttl(key) > 0
        await redis.hset(key, "c", b"\xff")
    assert await bus.store.service.exchange(None) == [A], "another version's is left out"
