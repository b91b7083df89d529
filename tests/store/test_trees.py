"""Turns of sessions, on every kind of bus."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from nano_inference.store.redis.keys import Keys
from nano_inference.store.trees import BLOCK_TOKENS, KeptTurn, TreeStore

from ..buses import STORES

BUSES = STORES

ROOM: dict[str, Any] = {"trees_max_bytes": 1 << 20}

LONG = tuple(range(3 * BLOCK_TOKENS + 5))
FIRST = KeptTurn("1-0 ä", LONG, b"first")
SECOND = KeptTurn("2-0", (*LONG, *range(BLOCK_TOKENS)), b"second")
SHORT = KeptTurn("3-0", (1, 2), b"short")


async def turns(trees: TreeStore, tenant: str = "t", session: str = "s") -> list[KeptTurn]:
    found = await trees.read(tenant, session)
    assert found is not None
    assert not found.lost
    return found.turns


async def test_turns_are_kept_once_and_apart(buses: Any) -> None:
    bus = buses.open(**ROOM)
    trees, other = bus.store.trees, buses.another(bus, **ROOM).store.trees
    assert await trees.read("t", "s") is None
    for each in (SECOND, FIRST, SHORT, FIRST):
        assert await trees.add("t", "s", each)
    assert await turns(other) == [FIRST, SECOND, SHORT]
    assert await other.read("t", "other") is None
    assert await other.read("other", "s") is None, "another tenant's session is unknown"


async def test_the_latest_epoch_of_a_turn_counts(buses: Any) -> None:
    trees = buses.open(**ROOM).store.trees
    stale, fresh = KeptTurn("1-0", (1,), b"stale"), KeptTurn("1-0", (1,), b"fresh")
    await trees.add("t", "s", fresh, epoch=12)
    await trees.add("t", "s", stale, epoch=9)
    assert await turns(trees) == [fresh]
    await trees.forget("t", "s", "1-0", epoch=12)
    assert await turns(trees) == [stale]


async def test_a_full_store_says_which_turns_are_lost(buses: Any) -> None:
    """A tenant may use as much as is left free: alone a half."""
    trees = buses.open(trees_max_bytes=12_000).store.trees
    assert await trees.add("t", "s", FIRST)
    lost = KeptTurn("4-0", tuple(range(9, 2000)), b"")
    assert not await trees.add("t", "s", lost)
    found = await trees.read("t", "s")
    assert found is not None
    assert (found.turns, found.lost) == ([FIRST], ["4-0"])
    assert await trees.add("t", "s", SECOND), "it shares the blocks of the first"
    assert await trees.drop("t", "s")
    assert not await trees.drop("t", "s")
    assert await trees.read("t", "s") is None
    assert await trees.add("t", "new", FIRST), "what was deleted is free again"


async def test_sessions_expire(redis_buses: Any) -> None:
    bus = redis_buses.open(**ROOM, trees_ttl_s=100)
    for each in (FIRST, SECOND):
        await bus.store.trees.add("t", "s", each)
    keys = Keys(redis_buses.prefix)
    async with Redis.from_url(redis_buses.url) as redis:
        assert 0 < await redis.ttl(keys.tree("t", "s")) <= 100
        assert 100 < await redis.ttl(keys.trees("t")) <= 110
        assert await redis.hgetall(keys.trees("t")) == await redis.hgetall(keys.trees_of_all)


def test_trees_are_of_one_model() -> None:
    names = [("t", "s"), ("tt", "s"), ("t", "ts")]
    found = {Keys("p", model=model).tree(*name) for model in ("", "m") for name in names}
    assert len(found) == 6
