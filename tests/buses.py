"""The buses that the contract suite runs on."""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference.bus import Bus, MemoryBus, RequestEntry, open_bus
from nano_inference.bus.shards import Layout
from nano_inference.config import STAGES, BusConfig
from nano_inference.store.redis.keys import Keys

from . import kit as kit
from .kit import LIMIT_S as LIMIT_S

ALL = frozenset(STAGES)
KINDS: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "memory": (ALL, {"url": "memory"}),
    "redis": (frozenset(), {}),
    "redis-local": (ALL, {}),
    "redis-links": (ALL, {"links": "redis"}),
    "cluster": (frozenset(), {}),
}
SHARDED = "redis-shards"
"""On Redis with four shards."""

STORES = [kind for kind in KINDS if kind not in ("redis-local", "redis-links")]
"""The kinds without those that differ in their links alone: all that is no link they share."""


class Buses:
    """Makes buses of one kind that share their keys, and closes them all."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.on_redis = kind != "memory"
        self.url = url
        self.prefix = f"test-{uuid.uuid4().hex[:8]}"
        self.keys = Keys(self.prefix)
        self._opened: list[Bus] = []

    def config(self, **settings: Any) -> BusConfig:
        defaults = {"url": self.url, "prefix": self.prefix}
        return BusConfig(**{**defaults, **KINDS.get(self.kind, (ALL, {}))[1], **settings})

    def open(self, **settings: Any) -> Bus:
        bus = open_bus(self.config(**settings), KINDS.get(self.kind, (ALL, {}))[0])
        self._opened.append(bus)
        return bus

    def another(self, bus: Bus, **settings: Any) -> Bus:
        """A second bus on the same keys; in memory there is only the one."""
        return self.open(**settings) if self.on_redis else bus

    def pair(self, **settings: Any) -> tuple[Bus, Bus]:
        """A bus and another one on the same keys."""
        bus = self.open(**settings)
        return bus, self.another(bus)

    async def reopen(self, bus: Bus) -> Bus:
        """Reopen as after a restart of the process; in memory, of a stage only."""
        if not self.on_redis:
            return bus
        await bus.aclose()
        return self.open()

    async def aclose(self) -> None:
        for bus in self._opened:
            await bus.aclose()


async def take(bus: Bus, count: int) -> list[RequestEntry]:
    """Take exactly `count` requests."""
    entries: list[RequestEntry] = []
    while len(entries) < count:
        entries += await bus.requests.take(count - len(entries))
    return entries


def ids_of(entries: Iterable[RequestEntry]) -> list[str]:
    return [entry.entry_id for entry in entries]


async def _buses(kind: str, url: str) -> AsyncIterator[Buses]:
    before = asyncio.all_tasks()
    buses = Buses(kind, url)
    if kind == SHARDED:
        async with Redis.from_url(url) as redis:
            layout = Layout(changes=1, shards=4, streams=4)
            await redis.set(buses.keys.shards, msgspec.json.encode(layout))
    yield buses
    await buses.aclose()
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leaked, f"tasks outlived their bus: {leaked}"
    if buses.on_redis and kind != "cluster":  # the cluster is nobody else's
        async with Redis.from_url(url) as redis:
            async for key in redis.scan_iter(f"*{buses.prefix}*"):
                await redis.delete(key)


def pytest_itemcollected(item: pytest.Item) -> None:
    """No test may hang for ever."""
    test = getattr(item, "obj", None)
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(3 * LIMIT_S):
            await test(*args, **kwargs)

    item.obj = limited  # type: ignore[attr-defined]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every kind of bus, or those that the module names in `BUSES`."""
    if "buses" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "BUSES", KINDS)
        metafunc.parametrize("buses", list(kinds), indirect=True)


@pytest_asyncio.fixture
async def buses(request: pytest.FixtureRequest) -> AsyncIterator[Buses]:
    """For the contract suite: each kind of bus in turn."""
    name = "cluster_url" if request.param == "cluster" else "redis_url"
    async for made in _buses(request.param, request.getfixturevalue(name)):
        yield made


@pytest_asyncio.fixture
async def redis_buses(redis_url: str) -> AsyncIterator[Buses]:
    """For what only Redis does."""
    async for made in _buses("redis", redis_url):
        yield made


@pytest_asyncio.fixture
async def foreign(redis_url: str) -> AsyncIterator[Redis]:
    """A plain client, as another program would use one."""
    async with Redis.from_url(redis_url, protocol=2, decode_responses=True) as redis:
        yield redis


@pytest_asyncio.fixture
async def bus(buses: Buses) -> Bus:
    return buses.open()


@pytest_asyncio.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBus(BusConfig())
    yield made
    await made.aclose()
