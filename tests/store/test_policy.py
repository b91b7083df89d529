"""The document of who may do what, on every kind of bus."""

from __future__ import annotations

import asyncio

from nano_inference.store.policy import NOTHING, PolicyState

from ..buses import STORES, Buses

BUSES = STORES


async def test_a_written_policy_is_read_once_by_other_gateways(buses: Buses) -> None:
    bus, other = buses.pair()
    assert await other.store.policy.read("") is None
    assert await other.store.policy.read("lost") == NOTHING
    assert await bus.store.policy.replace("", b"\x00one")
    state = await other.store.policy.read("")
    assert state.document == b"\x00one"
    assert await other.store.policy.read(state.version) is None
    # Without a version it is written by nobody who does not know what stands there.
    assert not await other.store.policy.replace("", b"two")
    assert await other.store.policy.replace(state.version, b"two")
    assert not await bus.store.policy.replace(state.version, b"three")
    again = await bus.store.policy.read(state.version)
    assert again == PolicyState(again.version if again else "", b"two")


async def test_of_many_writers_at_once_no_change_is_lost(buses: Buses) -> None:
    bus = buses.open()
    writers = [bus, buses.another(bus)] * 4

    async def add(number: int) -> None:
        record = writers[number].store.policy
        while True:
            state = await record.read("?")
            if await record.replace(state.version, state.document + bytes([number])):
                return

    await asyncio.gather(*(add(number) for number in range(len(writers))))
    state = await bus.store.policy.read("?")
    assert sorted(state.document) == list(range(len(writers)))
