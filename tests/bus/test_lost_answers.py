"""A server that takes another's place may lack what that has confirmed: terminal messages too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nano_inference.bus import Bus
from nano_inference.bus.redis import requests as redis_requests
from nano_inference.store.redis.keys import Keys

from ..servers import plain_client

BUSES = ["redis", "cluster"]


@pytest.fixture
async def plain(buses: Any) -> AsyncIterator[Any]:
    async with plain_client(buses.url) as client:
        yield client


@pytest.fixture
async def bus(buses: Any, monkeypatch: pytest.MonkeyPatch) -> Bus:
    """Looks often whether there is something to be taken once more."""
    monkeypatch.setattr(redis_requests, "TAKE_BLOCK_S", 0.1)
    made: Bus = buses.open()
    assert await made.requests.pending() == []
    return made


async def take(bus: Bus) -> str:
    async with asyncio.timeout(20):
        (entry,) = await bus.requests.take()
    return entry.entry_id


async def begin(bus: Bus) -> str:
    """A request `r` that was taken and is in use."""
    entry_id = await bus.requests.publish({"request_id": "r"})
    assert await take(bus) == entry_id
    assert await bus.results.claim([("r", entry_id)]) == [None]
    return entry_id


async def lose_copy(plain: Any, keys: Keys, entry_id: str) -> None:
    """What the results stream has got last, with its mark."""
    assert await plain.delete(keys.told("r", entry_id)) == 1
    assert await plain.xtrim(keys.results, maxlen=0, approximate=False) == 1


async def until_gone(plain: Any, keys: Keys, kit: Any) -> None:
    async def gone() -> bool:
        return await plain.xlen(keys.requests) == 0

    await kit.eventually(gone, "an entry that is acknowledged")


async def test_a_request_whose_end_was_lost_goes_on(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    first, last = kit.chunk("r", entry_id, 0), kit.done("r", entry_id)
    await bus.results.deliver([("r", [first, last])], 1)
    ((last_id, _),) = await plain.xrevrange(keys.out("r"), count=1)
    assert await plain.xdel(keys.out("r"), last_id) == 1
    await lose_copy(plain, keys, entry_id)
    await bus.requests.acknowledge(entry_id, "r")
    assert await take(bus) == entry_id
    assert await bus.results.claim([("r", entry_id)]) == [entry_id], "it was begun before"
    assert await bus.results.recover(["r"], 2) == [[first]]
    await bus.results.deliver([("r", [last])], 2)
    assert await plain.xlen(keys.results) == 1
    await bus.requests.acknowledge(entry_id, "r")
    await until_gone(plain, keys, kit)


async def test_an_answer_of_which_all_was_lost_is_given_again(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    await bus.results.deliver([("r", [kit.done("r", entry_id)])], 1)
    assert await plain.delete(keys.out("r")) == 1
    await lose_copy(plain, keys, entry_id)
    await bus.requests.acknowledge(entry_id, "r")
    assert await take(bus) == entry_id


async def test_a_copy_that_was_lost_is_written_again(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    last = kit.done("r", entry_id)
    await bus.results.deliver([("r", [last])], 1)
    await lose_copy(plain, keys, entry_id)
    await bus.requests.acknowledge(entry_id, "r")
    assert await take(bus) == entry_id
    assert await bus.results.recover(["r"], 2) == [[last]]
    assert await plain.xlen(keys.results) == 1
    await bus.requests.acknowledge(entry_id, "r")
    await until_gone(plain, keys, kit)


async def test_who_removes_what_he_has_read_does_no_harm(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    await bus.results.deliver([("r", [kit.done("r", entry_id)])], 1)
    assert await plain.delete(keys.out("r")) == 1
    await bus.requests.acknowledge(entry_id, "r")
    await until_gone(plain, keys, kit)


async def test_what_is_answered_under_its_entry_s_id_is_answered(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    """Its request's id is that of another one, which still runs."""
    keys, other = Keys(buses.prefix), await begin(bus)
    await bus.results.deliver([("r", [kit.chunk("r", other, 0)])], 1)
    entry_id = await bus.requests.publish({"request_id": "r"})
    assert await take(bus) == entry_id
    await bus.results.deliver([(entry_id, [kit.failed("r", entry_id, "duplicate_request")])], 1)
    await bus.requests.acknowledge(entry_id, "r")

    async def gone() -> bool:
        return await plain.xlen(keys.requests) == 1

    await kit.eventually(gone, "the one that was answered")


async def test_what_is_never_kept_is_answered_a_few_times_only(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    for _ in range(redis_requests.MOST_RETAKEN):
        await bus.requests.acknowledge(entry_id, "r")
        assert await take(bus) == entry_id
    await bus.requests.acknowledge(entry_id, "r")
    await until_gone(plain, keys, kit)


async def test_an_answer_given_again_is_told_once(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    """The copy has come to the server that is there now, and what it is a copy of has not."""
    keys, entry_id = Keys(buses.prefix), await begin(bus)
    await bus.results.deliver([("r", [kit.done("r", entry_id)])], 1)
    assert await plain.delete(keys.out("r")) == 1
    assert await bus.results.recover(["r"], 2) == [[]]
    await bus.results.deliver([("r", [kit.failed("r", entry_id, "other")])], 2)
    assert await plain.xlen(keys.results) == 1


# --- outputs before the end -------------------------------------------------------------------


async def deliver_five(bus: Bus, kit: Any) -> list[Any]:
    chunks = [kit.chunk("r", "1-1", i) for i in range(5)]
    await bus.results.deliver([("r", chunks)], 1)
    return chunks


async def end(bus: Bus, kit: Any, epoch: int) -> set[str]:
    """The streams that are not ended."""
    return await bus.results.deliver([("r", [kit.done("r", "1-1")])], epoch)


async def remove(plain: Any, keys: Keys, *numbers: int) -> None:
    ids = [f"1-{number}" for number in numbers]
    assert await plain.xdel(keys.out("r"), *ids) == len(ids)


async def test_a_stream_with_a_gap_is_not_ended(buses: Any, bus: Bus, plain: Any, kit: Any) -> None:
    keys, chunks = Keys(buses.prefix), await deliver_five(bus, kit)
    await remove(plain, keys, 3)
    assert await end(bus, kit, 1) == {"r"}
    assert await plain.xlen(keys.results) == 0
    assert await bus.results.recover(["r"], 2) == [[]]
    assert await bus.results.deliver([("r", [*chunks, kit.done("r", "1-1")])], 2) == set()
    assert await bus.results.recover(["r"], 3) == [[*chunks, kit.done("r", "1-1")]]


async def test_a_stream_that_lacks_its_last_outputs_is_not_ended(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys, chunks = Keys(buses.prefix), await deliver_five(bus, kit)
    entries = await plain.xrange(keys.out("r"), count=2)
    assert await plain.delete(keys.out("r")) == 1
    for entry_id, fields in entries:
        await plain.xadd(keys.out("r"), fields, id=entry_id)
    assert await end(bus, kit, 1) == {"r"}
    assert await bus.results.recover(["r"], 2) == [chunks[:2]]


async def test_a_stream_that_lacks_all_is_not_ended(
    buses: Any, bus: Bus, plain: Any, kit: Any
) -> None:
    keys = Keys(buses.prefix)
    await deliver_five(bus, kit)
    assert await plain.delete(keys.out("r")) == 1
    assert await end(bus, kit, 1) == {"r"}
    assert await bus.results.recover(["r"], 2) == [[]]


@pytest.mark.parametrize("removed", [2, 5])
async def test_who_removes_what_he_has_read_gets_the_end(
    buses: Any, bus: Bus, plain: Any, kit: Any, removed: int
) -> None:
    keys = Keys(buses.prefix)
    await deliver_five(bus, kit)
    await remove(plain, keys, *range(1, removed + 1))
    assert await end(bus, kit, 1) == set()
    ((last_id, _),) = await plain.xrevrange(keys.out("r"), count=1)
    assert last_id == b"1-6"
