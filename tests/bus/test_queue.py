"""The waiting line, under random use with cancellation."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.bus.queue import BoundedQueue

steps = st.lists(
    st.tuples(st.sampled_from(["put", "take", "cancel", "yield", "move"]), st.integers(0, 7)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=steps, capacity=st.integers(1, 3))
def test_each_item_comes_out_once_and_in_its_gates_order(
    steps: list[tuple[str, int]], capacity: int
) -> None:
    asyncio.run(_use(steps, capacity))


async def _use(steps: list[tuple[str, int]], capacity: int) -> None:
    line: BoundedQueue[tuple[str, int]] = BoundedQueue("a line")
    puts: dict[tuple[str, int], asyncio.Task[None]] = {}
    takes: list[asyncio.Task[list[tuple[str, int]]]] = []
    out: list[tuple[str, int]] = []

    async def take(most: int) -> list[tuple[str, int]]:
        taken = await line.take(most)
        out.extend(taken)
        return taken

    for number, (step, value) in enumerate(steps):
        if step == "put":
            gate = f"gate {value % 2}"
            puts[gate, number] = asyncio.create_task(line.put((gate, number), gate, capacity))
        elif step == "take":
            takes.append(asyncio.create_task(take(value + 1)))
        elif step == "cancel":
            started = [*puts.values(), *takes]
            if started:
                started[value % len(started)].cancel()
        elif step == "move":
            older, line = line, BoundedQueue("another line")
            out.extend(await older.take(1000) if len(older) else [])
            older.move_waiting_to(line)
            older.close()
        else:
            await asyncio.sleep(0)
        for gate in ("gate 0", "gate 1"):
            assert sum(item[0] == gate for _, item in line._items) <= capacity
    async with asyncio.timeout(20):
        while any(not task.done() for task in puts.values()) or len(line):
            await asyncio.sleep(0)
            if len(line):
                out.extend(await line.take(2))
    for task in takes:
        task.cancel()
    await asyncio.gather(*puts.values(), *takes, return_exceptions=True)

    assert len(out) == len(set(out))
    for name in ("gate 0", "gate 1"):
        numbers = [number for gate, number in out if gate == name]
        assert numbers == sorted(numbers)
    finished = {
        item for item, task in puts.items() if not task.cancelled() and not task.exception()
    }
    assert finished <= set(out)


async def test_wake_up_of_a_cancelled_taker_is_passed_on() -> None:
    line: BoundedQueue[int] = BoundedQueue("a line")
    first, second = asyncio.create_task(line.take(1)), asyncio.create_task(line.take(1))
    await asyncio.sleep(0)
    await line.put(7)
    first.cancel()
    async with asyncio.timeout(20):
        assert await second == [7]
    assert first.cancelled()
