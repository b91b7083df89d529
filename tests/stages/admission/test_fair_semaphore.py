"""Whose turn it is where only a few may go at a time."""

from __future__ import annotations

import asyncio

import pytest

from nano_inference.stages.admission.long_prompts import FairSemaphore


async def waiting(turns: FairSemaphore, order: list[str], name: str) -> None:
    await turns.acquire(name[0])
    order.append(name)


async def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    turns, order = FairSemaphore(1), list[str]()
    await turns.acquire("a")
    names = ["a1", "a2", "a3", "b1", "c1", "b2"]
    tasks = [asyncio.create_task(waiting(turns, order, name)) for name in names]
    await asyncio.sleep(0)
    for _ in names:
        turns.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    turns.release()
    await asyncio.wait_for(asyncio.gather(*tasks, turns.acquire("d")), 5)


@pytest.mark.parametrize("handed", [False, True])
async def test_a_cancelled_wait_gives_its_place_on(handed: bool) -> None:
    turns, order = FairSemaphore(1), list[str]()
    await turns.acquire("a")
    left = asyncio.create_task(waiting(turns, order, "b1"))
    stays = asyncio.create_task(waiting(turns, order, "b2"))
    await asyncio.sleep(0)
    if handed:
        turns.release()
    left.cancel()
    await asyncio.wait([left])
    if not handed:
        turns.release()
    await asyncio.wait_for(stays, 5)
    assert order == ["b2"]
