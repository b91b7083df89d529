"""The buses that the contract suite runs on, and small builders."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference.bus import Bus, Inbox, MemoryBus, OutputStream, RequestEntry, Sender, open_bus
from nano_inference.bus.messages import Credit, Envelope, Message
from nano_inference.bus.public import Completion, CompletionChunk, ErrorInfo, Output
from nano_inference.config import STAGES, BusConfig
from nano_inference.store.redis.keys import Keys

LIMIT_S = 20.0

ALL = frozenset(STAGES)
KINDS: dict[str, tuple[frozenset[str], dict[str, Any]]] = {
    "memory": (ALL, {"url": "memory"}),
    "redis": (frozenset(), {}),
    "redis-local": (ALL, {}),
    "redis-links": (ALL, {"links": "redis"}),
    "cluster": (frozenset(), {}),
}
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
        return BusConfig(**{**defaults, **KINDS[self.kind][1], **settings})

    def open(self, **settings: Any) -> Bus:
        bus = open_bus(self.config(**settings), KINDS[self.kind][0])
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
        """As after a restart of the process; in memory that of a stage only."""
        if not self.on_redis:
            return bus
        await bus.aclose()
        return self.open()

    async def aclose(self) -> None:
        for bus in self._opened:
            await bus.aclose()


class Kit:
    """Waiting, and builders with short arguments."""

    limit_s = LIMIT_S

    @staticmethod
    def credit(number: int) -> Credit:
        return Credit(sequences=number)

    @staticmethod
    def chunk(request_id: str, entry_id: str, offset: int) -> CompletionChunk:
        return CompletionChunk(
            request_id=request_id,
            entry_id=entry_id,
            sample_index=0,
            token_offset=offset,
            token_ids=(offset,),
            logprobs=(-0.5,),
            text=f"t{offset}",
        )

    @staticmethod
    def done(request_id: str, entry_id: str) -> Completion:
        return Completion(request_id=request_id, entry_id=entry_id, status="done", model="tiny")

    @staticmethod
    def failed(request_id: str, entry_id: str, code: str) -> Completion:
        return Completion(
            request_id=request_id,
            entry_id=entry_id,
            status="error",
            error=ErrorInfo(code=code, message="because"),
        )

    @staticmethod
    async def receive(inbox: Inbox, count: int) -> list[Envelope]:
        """Receive exactly `count` messages."""
        received: list[Envelope] = []
        while len(received) < count:
            received += await inbox.receive(count - len(received))
        return received

    @staticmethod
    async def bodies(inbox: Inbox, count: int) -> list[Message]:
        return [envelope.body for envelope in await Kit.receive(inbox, count)]

    @staticmethod
    async def send_all(sender: Sender, numbers: range) -> None:
        for number in numbers:
            await sender.send(Credit(sequences=number))

    @staticmethod
    async def collect(stream: OutputStream[Output]) -> list[Output]:
        return [output async for output in cast(AsyncIterator[Output], stream)]

    @staticmethod
    async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
        """Polls until `holds`; fails after `LIMIT_S`."""
        end = time.monotonic() + LIMIT_S
        while not await holds():
            assert time.monotonic() < end, f"never came: {what}"
            await asyncio.sleep(0.01)

    @staticmethod
    async def becomes(value: Callable[[], Awaitable[Any]], wanted: Any) -> None:
        """Polls until the value is as wanted; fails after `LIMIT_S`."""
        end = time.monotonic() + LIMIT_S
        while (last := await value()) != wanted:
            assert time.monotonic() < end, f"it is {last!r}, and not {wanted!r}"
            await asyncio.sleep(0.01)

    @staticmethod
    async def settled(value: Callable[[], int]) -> int:
        """The value once it has not changed for a while (a slow machine only makes it smaller)."""
        last, same = value(), 0
        while same < 15:
            await asyncio.sleep(0.01)
            last, same = (last, same + 1) if value() == last else (value(), 0)
        return last


kit = Kit()


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
