"""The contract of `ended`: every result once, over cut connections, or an error."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from nano_inference.bus import Bus, MemoryBus
from nano_inference.bus.memory.results import KEPT_RECORDS
from nano_inference.bus.redis.readers import BUFFERED, PAGE
from nano_inference.config import BusError, RequestError

from ..buses import SHARDED, kit

BUSES = ["memory", SHARDED]


async def end(bus: Bus, *names: str) -> None:
    """End requests that are published, each on its tenant's shard."""
    outputs = []
    for place, name in enumerate(names):
        about = {"request_id": name, "prompt": "x", "tenant": f"t{place % 5}"}
        outputs.append((name, [kit.done(name, await bus.requests.publish(about))]))
    await bus.results.deliver(outputs)


async def read(ended: Any, count: int) -> list[str]:
    return [(await anext(ended)).request_id for _ in range(count)]


async def test_each_result_comes_once_over_many_cuts(buses: Any) -> None:
    bus, reader = buses.pair()
    await end(bus, "before")
    ended = await reader.results.ended()
    position, found = ended.position, list[str]()
    names = [f"r{number}" for number in range(20)]
    for number in range(0, 20, 5):
        await end(bus, *names[number : number + 5])
        # Cut after some results; the others come after the position.
        async with aclosing(ended):
            found += await read(ended, 3)
            position = ended.position
        ended = await reader.results.ended(position)
    async with aclosing(ended):
        found += await read(ended, 20 - len(found))
    assert sorted(found) == sorted(names)


async def test_unreadable_position_is_refused(buses: Any) -> None:
    results = buses.open().results
    for position in ("1", "1-1,", "1-x", "1-1;2-2", "1-" + "9" * 40):
        with pytest.raises(RequestError, check=lambda e: e.code == "invalid_position"):
            await results.ended(position)


async def test_slow_reader_buffers_a_bounded_number_and_misses_none(redis_buses: Any) -> None:
    bus = redis_buses.open()
    ended = await bus.results.ended()
    number = 2 * BUFFERED + 3 * PAGE
    await bus.results.deliver([(f"r{n}", [kit.done(f"r{n}", f"{n + 1}-1")]) for n in range(number)])
    buffered = await kit.settled(lambda: len(ended._subscription._queue))
    assert BUFFERED <= buffered < BUFFERED + PAGE
    assert await read(ended, number) == [f"r{n}" for n in range(number)]
    await ended.aclose()


@pytest.mark.parametrize("paused", [True, False])
async def test_results_trimmed_before_they_were_read_are_an_error(
    redis_buses: Any, foreign: Any, paused: bool
) -> None:
    """While a slow reader is paused, and while none reads."""
    bus = redis_buses.open(results_maxlen=2000)
    ended = await bus.results.ended()
    number = 2 * BUFFERED
    await bus.results.deliver([(f"r{n}", [kit.done(f"r{n}", f"{n + 1}-1")]) for n in range(number)])
    if paused:
        await kit.settled(lambda: len(ended._subscription._queue))
    else:
        await read(ended, 1)
        position = ended.position
        await ended.aclose()
    await foreign.xtrim(redis_buses.keys.results, maxlen=10, approximate=False)
    if not paused:
        ended = await bus.results.ended(position)
    found = []
    with pytest.raises(BusError, check=lambda e: e.code == "results_lost"):
        while True:
            found += await read(ended, 1)
    # Nothing from after the gap has come.
    assert found == [f"r{n}" for n in range(not paused, len(found) + (not paused))]


async def test_memory_refuses_a_reader_that_is_too_far_behind(memory_bus: MemoryBus) -> None:
    ended = await memory_bus.results.ended()
    for n in range(KEPT_RECORDS + 1):
        await memory_bus.results.deliver([(f"r{n}", [kit.done(f"r{n}", f"e{n}")])])
    with pytest.raises(BusError, check=lambda e: e.code == "results_lost"):
        await anext(ended)
    position = (await memory_bus.results.ended()).position
    with pytest.raises(BusError, check=lambda e: e.code == "results_lost"):
        await memory_bus.results.ended(f"other-{position.partition('-')[2]}")


async def test_closing_ends_a_waiting_reader(buses: Any) -> None:
    ended = await buses.open().results.ended()
    waiting = asyncio.ensure_future(anext(ended))
    await asyncio.sleep(0)
    await ended.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting
