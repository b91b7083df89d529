"""The waiting line, under random use with cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.queue import BoundedQueue

steps = st.lists(
    st.tuples(st.sampled_from(["put", "take", "cancel", "yield", "move"]), st.integers(0, 7)),
    max_size=60,
)


@pytest.mark.soak
@given(steps=steps, capacity=st.integers(1, 3))
def test_each_item_comes_out_once_and_in_its_producers_order(
    steps: list[tuple[str, int]], capacity: int
) -> None:
    asyncio.run(_use(steps, capacity))


async def _use(steps: list[tuple[str, int]], capacity: int) -> None:
    queue: BoundedQueue[tuple[str, int]] = BoundedQueue("a line")
    puts: dict[tuple[str, int], asyncio.Task[None]] = {}
    takes: list[asyncio.Task[list[tuple[str, int]]]] = []
    out: list[tuple[str, int]] = []

    async def take(most: int) -> list[tuple[str, int]]:
        taken = await queue.take(most)
        out.extend(taken)
        return taken

    for number, (step, value) in enumerate(steps):
        if step == "put":
            producer = f"producer {value % 2}"
            puts[producer, number] = asyncio.create_task(
                queue.put((producer, number), producer, capacity)
            )
        elif step == "take":
            takes.append(asyncio.create_task(take(value + 1)))
        elif step == "cancel":
            started = [*puts.values(), *takes]
            if started:
                started[value % len(started)].cancel()
        elif step == "move":
            older, queue = queue, BoundedQueue("another line")
            out.extend(await older.take(1000) if len(older) else [])
            older.move_waiting_to(queue)
            older.close()
        else:
            await asyncio.sleep(0)
        for producer in ("producer 0", "producer 1"):
            assert sum(item[0] == producer for _, item in queue._items) <= capacity
    while any(not task.done() for task in puts.values()) or len(queue):
        await asyncio.sleep(0)
        if len(queue):
            out.extend(await queue.take(2))
    for task in takes:
        task.cancel()
    await asyncio.gather(*puts.values(), *takes, return_exceptions=True)

    assert len(out) == len(set(out))
    for name in ("producer 0", "producer 1"):
        numbers = [number for producer, number in out if producer == name]
        assert numbers == sorted(numbers)
    finished = {
        item for item, task in puts.items() if not task.cancelled() and not task.exception()
    }
    assert finished <= set(out)


async def test_wake_up_of_a_cancelled_taker_is_passed_on() -> None:
    queue: BoundedQueue[int] = BoundedQueue("a line")
    first, second = asyncio.create_task(queue.take(1)), asyncio.create_task(queue.take(1))
    await asyncio.sleep(0)
    await queue.put(7)
    first.cancel()
    assert await second == [7]
    assert first.cancelled()
