"""Tenants take turns by the time that their work has used."""

from __future__ import annotations

import asyncio

import pytest

from nano_inference.media.turns import FairSemaphore


async def waiting(turns: FairSemaphore, order: list[str], name: str) -> None:
    await turns.acquire(name[0])
    order.append(name)


async def served(turns: FairSemaphore, names: list[str], costs: dict[str, float]) -> list[str]:
    """Return the order in which names get a place, each with its tenant's cost."""
    order: list[str] = []
    await turns.acquire("first")
    tasks = [asyncio.create_task(waiting(turns, order, name)) for name in names]
    await asyncio.sleep(0)
    turns.release("first")
    for number in range(len(names)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tenant = order[number][0]
        turns.release(tenant, costs[tenant])
    await asyncio.gather(*tasks)
    return order


async def test_equal_tenants_take_turns_and_each_keeps_its_order() -> None:
    names = ["a1", "a2", "a3", "b1", "c1", "b2"]
    order = await served(FairSemaphore(1), names, dict.fromkeys("abc", 1.0))
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_slow_tenant_gets_as_much_time_as_a_fast_one() -> None:
    names = ["a1", "a2", *(f"b{number}" for number in range(12))]
    order = await served(FairSemaphore(1), names, {"a": 10.0, "b": 1.0})
    assert order[0] == "a1"
    assert order.index("a2") == 11, "ten of b follow the first of a, and one more at equal time"


async def test_nothing_is_owed_once_all_are_idle() -> None:
    turns = FairSemaphore(1)
    await turns.acquire("a")
    waits = asyncio.create_task(turns.acquire("b"))
    await asyncio.sleep(0)
    turns.release("a", 5.0)
    await waits
    assert turns._used_s == {"a": 5.0, "b": 0.0}
    turns.release("b", 1.0)
    assert not turns._used_s
    assert not turns._holds


async def test_a_spare_place_is_for_a_tenant_that_holds_none() -> None:
    turns, order = FairSemaphore(2, spare=1), list[str]()
    await turns.acquire("a")
    await turns.acquire("a")
    third = asyncio.create_task(waiting(turns, order, "a3"))
    await asyncio.wait_for(turns.acquire("b"), 5)
    assert not third.done()
    turns.release("b")
    await asyncio.sleep(0)
    assert not third.done()
    turns.release("a")
    await asyncio.wait_for(third, 5)


@pytest.mark.parametrize("handed", [False, True])
async def test_a_cancelled_wait_frees_its_place(handed: bool) -> None:
    turns, order = FairSemaphore(1), list[str]()
    await turns.acquire("a")
    left = asyncio.create_task(waiting(turns, order, "b1"))
    stays = asyncio.create_task(waiting(turns, order, "b2"))
    await asyncio.sleep(0)
    if handed:
        turns.release("a")
    left.cancel()
    await asyncio.wait([left])
    if not handed:
        turns.release("a")
    await asyncio.wait_for(stays, 5)
    assert order == ["b2"]
