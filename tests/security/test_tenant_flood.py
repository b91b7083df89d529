"""One tenant that sends without end: others are not refused for it, and don't wait long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from nano_inference.bus import Bus
from nano_inference.bus.redis import leases as redis_leases
from nano_inference.bus.redis.waiting import WaitingEntries
from nano_inference.config import FairnessConfig

from ..buses import kit
from ..stages.fairness.replica import StepReplica
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


async def test_those_are_refused_who_have_most_and_not_who_came_last(bus: Bus) -> None:
    flood = await send(bus, "flood", 300)
    quiet = await send(bus, "quiet", 5)
    flood += await send(bus, "flood", 100)
    assert await shed(bus, 50) == 355
    assert await left(bus) == [*flood[:45], *quiet]


async def test_who_comes_after_the_flood_was_refused_is_let_in(bus: Bus) -> None:
    flood = await send(bus, "flood", 30)
    assert await shed(bus, 20) == 10
    quiet = await send(bus, "quiet", 4)
    assert await shed(bus, 20) == 4
    assert await left(bus) == [*flood[:16], *quiet]


async def test_nobody_loses_one_while_somebody_else_has_more(bus: Bus) -> None:
    sent = {tenant: await send(bus, tenant, n) for tenant, n in (("a", 9), ("b", 6), ("c", 2))}
    assert await shed(bus, 10) == 7
    kept = await left(bus)
    assert [sum(each in kept for each in sent[tenant]) for tenant in "abc"] == [4, 4, 2]


async def test_what_was_taken_counts_no_longer(bus: Bus) -> None:
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
async def test_what_is_odd_is_not_taken_for_anothers(
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


# --- what runs ------------------------------------------------------------------------------------

SLICE = FairnessConfig().tenant_timeslice_tokens


def full_replica(config: FairnessConfig | None = None, **fields: Any) -> StepReplica:
    """All places have long sequences of one tenant, which has more of them that wait."""
    replica = StepReplica(config, places=4, **fields)
    for number in range(8):
        replica.submit(f"long-{number}", 1000, tenant="flood")
    return replica


@pytest.mark.parametrize("kv_free", [10**9, 0])
def test_a_newcomer_gets_a_place_when_a_slice_is_used_up(kv_free: int) -> None:
    replica = full_replica(kv_free=kv_free)
    replica.step(10)
    replica.submit("new", 5, tenant="quiet")
    replica.run_until("new")
    assert replica.steps <= SLICE + 1
    replica.run()
    assert replica.finished[0] == "new"
    assert len(set(replica.finished)) == 9
    assert max(replica.preemptions.values(), default=0) <= FairnessConfig().max_preemptions


def test_without_that_it_waits_until_one_ends() -> None:
    replica = full_replica(FairnessConfig(tenant_timeslice_tokens=0))
    replica.submit("new", 5, tenant="quiet")
    replica.run_until("new")
    assert replica.steps == 1000


def test_one_tenant_alone_never_makes_room_for_itself() -> None:
    replica = full_replica()
    replica.submit("urgent", 5, tenant="flood", priority=4)
    replica.run()
    assert replica.core.counts.yields == replica.core.counts.preemptions == 0


def test_high_priorities_keep_their_places() -> None:
    replica = StepReplica(places=1)
    replica.submit("high", 500, tenant="flood", priority=5)
    replica.submit("new", 5, tenant="quiet", priority=5)
    replica.run()
    assert replica.finished == ["high", "new"]


@pytest.mark.parametrize("kv_free", [10**9, 2000, 0])
def test_two_floods_share_and_change_places_no_oftener_than_slices_end(kv_free: int) -> None:
    replica = StepReplica(places=4, kv_free=kv_free)
    for number in range(12):
        for tenant in ("a", "b"):
            replica.submit(f"{tenant}{number}", 300, tenant=tenant)
    replica.run()
    counts = replica.core.counts
    assert (counts.yields + counts.preemptions) * SLICE <= 24 * 300
    assert max(replica.preemptions.values(), default=0) <= FairnessConfig().max_preemptions
    assert len(replica.finished) == 24
