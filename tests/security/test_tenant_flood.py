"""One tenant that sends without end: others are not refused for it, and don't wait long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from nano_inference.bus import Bus
from nano_inference.bus.redis import leases as redis_leases
from nano_inference.bus.redis.waiting import WaitingEntries

from ..buses import kit
from .conftest import Write

LIMIT_S = 30


@pytest_asyncio.fixture
async def bus(redis_bus: Bus) -> Bus:
    await redis_bus.requests.pending()
    return redis_bus


async def send(bus: Bus, tenant: str, number: int, prompt: str = "x") -> list[str]:
    return [await bus.requests.publish({"prompt": prompt, "tenant": tenant}) for _ in range(number)]


async def shed(bus: Bus, max_queued: int) -> int:
    total = 0
    while number := await bus.requests.shed(max_queued, kit.overloaded, 1):
        total += number
    return total


async def left(bus: Bus) -> list[str]:
    """The entries that still wait, oldest first."""
    number = (await bus.requests.backlog()).waiting
    taken: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while len(taken) < number:
            taken += [entry.entry_id for entry in await bus.requests.take(64)]
    return taken


# --- what is refused ------------------------------------------------------------------------------


async def test_the_tenant_with_most_requests_is_refused_not_the_last_to_come(bus: Bus) -> None:
    flood = await send(bus, "flood", 300)
    quiet = await send(bus, "quiet", 5)
    flood += await send(bus, "flood", 100)
    assert await shed(bus, 50) == 355
    assert await left(bus) == [*flood[:45], *quiet]


async def test_a_tenant_that_comes_after_the_flood_was_refused_is_admitted(bus: Bus) -> None:
    flood = await send(bus, "flood", 30)
    assert await shed(bus, 20) == 10
    quiet = await send(bus, "quiet", 4)
    assert await shed(bus, 20) == 4
    assert await left(bus) == [*flood[:16], *quiet]


async def test_a_tenant_loses_no_request_while_another_has_more(bus: Bus) -> None:
    sent = {tenant: await send(bus, tenant, n) for tenant, n in (("a", 9), ("b", 6), ("c", 2))}
    assert await shed(bus, 10) == 7
    kept = await left(bus)
    assert [sum(each in kept for each in sent[tenant]) for tenant in "abc"] == [4, 4, 2]


async def test_taken_requests_do_not_count(bus: Bus) -> None:
    old = await send(bus, "flood", 10)
    assert await shed(bus, 9) == 1
    async with asyncio.timeout(LIMIT_S):
        assert len(await bus.requests.take(8)) == 8
    new = [*await send(bus, "flood", 2), *await send(bus, "quiet", 4)]
    assert await shed(bus, 5) == 2
    assert await left(bus) == [old[8], *new[:4]]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("json", '{"prompt": "x"}'),  # the default tenant's
        ("json", r'{"prompt": "\"tenant\": \"quiet\"", "tenant" : "flood"}'),
        ("json", '{"prompt": "tenant", "stop": ["tenant"], "tenant":"flood"}'),
        ("json", "nonsense"),
        ("msgpack", b"\x81\xa6tenant\xa5quiet"),
        ("other", "x"),
    ],
)
async def test_an_odd_tenant_is_not_counted_as_another(
    bus: Bus, write_entry: Write, field: str, body: str | bytes
) -> None:
    quiet = await send(bus, "quiet", 3)
    for _ in range(6):
        await write_entry({field: body})
    assert await shed(bus, 5) == 4
    assert (await left(bus))[:3] == quiet


async def test_each_entry_is_looked_at_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    original = WaitingEntries.add

    def add(self: WaitingEntries, rows: Any) -> None:
        nonlocal looked
        seen = list(rows)
        looked += len(seen)
        original(self, seen)

    monkeypatch.setattr(WaitingEntries, "add", add)
    monkeypatch.setattr(redis_leases, "LOOK_PAGE", 16)
    await send(bus, "flood", 100)
    for _ in range(5):
        await shed(bus, 50)
    assert looked == 100
    await send(bus, "flood", 30)
    await shed(bus, 50)
    assert looked == 130


def test_of_a_stream_of_any_length_a_part_is_known() -> None:
    waiting = WaitingEntries()
    waiting.add((f"1-{number}".encode(), "a") for number in range(1, 6))
    waiting.forget_taken(b"1-2")
    assert (len(waiting), waiting.position) == (3, b"1-5")
    assert waiting.take_newest(2) == [b"1-5", b"1-4"]
    waiting.forget_taken(b"1-9")
    assert (len(waiting), waiting.position) == (0, b"1-9")
    waiting.forget_taken(b"0-0")  # all wait again
    assert waiting.position == b"0-0"
