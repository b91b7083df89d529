"""Calls that outlive their connection, on every kind of bus."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from nano_inference.bus import Bus
from nano_inference.config import BusConfig
from nano_inference.store.calls import CALL_BYTES, CallsFull, DurableCall

from ..buses import STORES, Buses, kit

BUSES = STORES
SOON_S = 0.05


async def test_a_call_is_found_with_all_that_was_noted(buses: Buses) -> None:
    bus, other = buses.pair()
    assert await bus.store.calls.read("c") is None
    await bus.store.calls.keep("c", b"\x00record", 10)
    assert await other.store.calls.read("c") == DurableCall(b"\x00record")
    for request_id, entry_id in (("c_0", "1-0"), ("c_1", "2-0")):
        assert not await bus.store.calls.note("c", request_id, entry_id)
    await other.store.calls.mark("c", "resumed")
    entries = {"c_0": "1-0", "c_1": "2-0"}
    wanted = DurableCall(b"\x00record", entries, frozenset({"resumed"}))
    assert await other.store.calls.read("c") == wanted
    assert await other.store.calls.read("c_0") is None
    # Another record changes nothing else.
    await bus.store.calls.keep("c", b"other", 10)
    wanted = DurableCall(b"other", entries, frozenset({"resumed"}))
    assert await other.store.calls.read("c") == wanted
    # Whoever publishes after that is told.
    await bus.store.calls.mark("c", "cancelled")
    assert await other.store.calls.note("c", "c_2", "3-0")
    await other.store.calls.drop("c")
    assert await bus.store.calls.read("c") is None


async def test_the_first_to_claim_a_name_has_it(buses: Buses) -> None:
    bus, other = buses.pair()
    assert await bus.store.calls.named("name") == ""
    assert await bus.store.calls.claim("name", "c") == "c"
    assert await other.store.calls.named("name") == "c"
    assert await other.store.calls.claim("name", "d") == "c"
    assert await bus.store.calls.claim("name", "c") == "c"
    assert await other.store.calls.claim("another", "d") == "d"
    await bus.store.calls.drop("c", "name")
    assert await other.store.calls.claim("name", "d") == "d"


async def test_an_orphaned_call_is_reported_once(buses: Buses) -> None:
    bus, other = buses.pair()
    for call_id in ("attended", "ended"):
        await bus.store.calls.keep(call_id, b"", 1000)
    for call_id in ("left", "short", "unwatched"):
        await bus.store.calls.keep(call_id, b"", 0 if call_id == "unwatched" else SOON_S)
    # A shorter time does not count.
    await other.store.calls.attach({"attended": "", "left": ""}, SOON_S)
    await bus.store.calls.detach(["ended"])
    told: list[str] = []

    async def all_told() -> bool:
        told.extend(await other.store.calls.orphaned(1))
        return len(told) == 2

    await kit.eventually(all_told, "the two that were left")
    assert set(told) == {"left", "short"}
    assert await bus.store.calls.orphaned(10) == []
    # Attended again, it may be abandoned again.
    await bus.store.calls.attach({"left": ""}, SOON_S)

    await kit.becomes(lambda: bus.store.calls.orphaned(10), ["left"])


async def test_of_two_gateways_that_look_at_once_one_has_the_orphan(buses: Buses) -> None:
    """The other looks while the first is about to take it."""
    bus, other = buses.pair()
    await bus.store.calls.keep("left", b"", SOON_S)
    store, found = bus.store.calls, list[str]()
    real = store._records.run_all

    async def run_all(commands: Sequence[Any], **more: Any) -> Any:
        if commands and commands[0][0] == "ZREM":
            store._records.run_all = real  # type: ignore[method-assign]
            found.extend(await other.store.calls.orphaned(10))
        return await real(commands, **more)

    store._records.run_all = run_all  # type: ignore[method-assign]

    async def is_found() -> bool:
        found.extend(await store.orphaned(10))
        return bool(found)

    await kit.eventually(is_found, "the call is left")
    assert found == ["left"]


async def test_a_call_is_forgotten_with_its_results(buses: Buses) -> None:
    """An attached call is kept, and so is its name."""
    bus = buses.open(results_ttl_s=1)
    for call_id in ("short", "long"):
        await bus.store.calls.keep(call_id, b"", 0)
        await bus.store.calls.claim(f"name of {call_id}", call_id)

    async def gone() -> bool:
        await bus.store.calls.attach({"long": "name of long"}, 0)
        return await bus.store.calls.read("short") is None

    await kit.eventually(gone, "the end of what nobody attends")
    assert await bus.store.calls.read("long") == DurableCall(b"")
    assert await bus.store.calls.claim("name of long", "other") == "long"

    await kit.becomes(lambda: bus.store.calls.claim("name of short", "other"), "other")


MOST = 12 * CALL_BYTES


def limited(buses: Buses) -> tuple[Bus, Bus]:
    bus = buses.open(calls_max_bytes=MOST)
    return bus, buses.another(bus, calls_max_bytes=MOST)


async def stored(bus: Bus, call_id: str, tenant: str, size: int = 0) -> bool:
    """Whether there was room for a call."""
    try:
        await bus.store.calls.keep(call_id, b"x" * size, 10, tenant)
    except CallsFull as error:
        return not 0 < (error.retry_after_s or 0) < 2 * BusConfig().results_ttl_s
    return True


async def test_a_tenant_uses_as_much_as_it_leaves_free(buses: Buses) -> None:
    bus, other = limited(buses)
    assert [await stored(bus, f"a{place}", "a") for place in range(7)] == [True] * 6 + [False]
    # Larger ones count as much as they have; nothing is counted of what was refused.
    assert not await stored(other, "b", "b", 3 * CALL_BYTES)
    assert await stored(other, "b", "b", 2 * CALL_BYTES)
    assert not await stored(bus, "b2", "b")
    assert await stored(bus, "c", "c")
    for place in range(6):
        assert await other.store.calls.read(f"a{place}") is not None, "none made room"
    # Room comes back once for each call, in whichever way it goes.
    for _ in range(2):
        await bus.store.calls.drop("a0")
    await other.store.calls.keep("b", b"", 0)
    assert [await stored(other, f"d{place}", "d") for place in range(3)] == [True, True, False]


async def test_calls_at_once_share_the_room(buses: Buses) -> None:
    bus, other = limited(buses)
    calls = [stored((bus, other)[place % 2], str(place), "a") for place in range(40)]
    found = await asyncio.gather(*calls)
    assert sum(found) <= 6
    kept = [await bus.store.calls.read(str(place)) is not None for place in range(40)]
    assert kept == found


async def test_expired_calls_make_room(buses: Buses) -> None:
    """An attached call counts, however long it lasts."""
    bus = buses.open(calls_max_bytes=MOST, results_ttl_s=1)
    for place in range(6):
        assert await stored(bus, str(place), "a")

    async def has_room() -> bool:
        await bus.store.calls.attach(dict.fromkeys("012", ""), 0)
        return await stored(bus, "more", "a")

    await kit.eventually(has_room, "the end of what nobody attends")
    assert [await stored(bus, f"more{place}", "a") for place in range(3)] == [True, True, False]
    assert await bus.store.calls.read("0") is not None


async def test_a_kept_stream_can_be_followed_again(bus: Bus) -> None:
    entry_id = await bus.requests.publish({"prompt": "x", "request_id": "r"})
    outputs = [kit.chunk("r", entry_id, 0), kit.done("r", entry_id)]
    await bus.results.deliver([("r", outputs)])
    for asked in (entry_id, ""):
        assert await kit.collect(bus.results.follow("r", asked, keep=True)) == outputs
    assert await kit.collect(bus.results.follow("r", entry_id)) == outputs


async def test_memory_keeps_few_of_those_followed(
    memory_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nano_inference.bus.memory import results
    from nano_inference.config import BusError

    monkeypatch.setattr(results, "KEPT_OUTPUTS", 3)
    entries = []
    for name in ("a", "b"):
        entry_id = await memory_bus.requests.publish({"prompt": "x", "request_id": name})
        outputs = [kit.chunk(name, entry_id, 0), kit.done(name, entry_id)]
        await memory_bus.results.deliver([(name, outputs)])
        await kit.collect(memory_bus.results.follow(name, entry_id, keep=True))
        entries.append(entry_id)
    assert await kit.collect(memory_bus.results.follow("b", entries[1], keep=True)) == outputs
    with pytest.raises(BusError, match="no longer kept"):
        await kit.collect(memory_bus.results.follow("a", entries[0]))
