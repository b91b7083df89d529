"""Long texts and constraints wait for threads, round robin by tenant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from nano_inference.bus import RequestEntry
from nano_inference.bus.messages import Prompt
from nano_inference.bus.public import GenerateRequest
from nano_inference.stages.admission.arrivals import Tokens
from nano_inference.stages.admission.long_prompts import (
    AT_A_TIME,
    LONG_TEXT,
    FairSemaphore,
    LongPrompts,
)

LIMIT_S = 20


class Work:
    """Work in threads that goes on until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []

    def __call__(self, request: GenerateRequest) -> Tokens:
        self.begun.append(request.tenant)
        assert self.go.wait(LIMIT_S)
        return Tokens(Prompt(()))

    def check(self, request: GenerateRequest) -> None:
        """The same of a constraint."""
        self(request)


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.go.set()


def entries(tenant: str, count: int, *, prompt: str = "a") -> list[RequestEntry]:
    request = GenerateRequest(prompt=prompt, tenant=tenant)
    return [RequestEntry(f"{tenant}-{number}", request) for number in range(count)]


async def begun(work: Work, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(work.begun) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_constraints_are_compiled_one_at_a_time_round_robin_by_tenant(work: Work) -> None:
    prompts = LongPrompts()
    waiting = [*entries("a", 3), *entries("b", 1), *entries("c", 1)]
    tasks = [
        asyncio.create_task(prompts.run(each, None, work.check, is_constraint=True))
        for each in waiting
    ]
    await begun(work, 1)
    work.go.set()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*tasks) == [None] * 5
    assert work.begun == ["a", "a", "b", "c", "a"]


async def test_constraints_and_long_texts_do_not_wait_for_each_other(work: Work) -> None:
    prompts, held = LongPrompts(), Work()
    long = entries("a", AT_A_TIME, prompt="x" * LONG_TEXT)
    tasks = [asyncio.create_task(prompts.run(each, None, held)) for each in long]
    await begun(held, AT_A_TIME)
    work.go.set()
    async with asyncio.timeout(LIMIT_S):
        assert await prompts.run(*entries("b", 1), None, work.check, is_constraint=True) is None
        held.go.set()
        assert await asyncio.gather(*tasks) == [Tokens(Prompt(()))] * AT_A_TIME


async def test_a_short_text_waits_for_no_turn(work: Work) -> None:
    prompts = LongPrompts()
    long = entries("a", AT_A_TIME, prompt="x" * LONG_TEXT)
    tasks = [asyncio.create_task(prompts.run(each, None, work)) for each in long]
    await begun(work, AT_A_TIME)
    at_once = Work()
    at_once.go.set()
    async with asyncio.timeout(LIMIT_S):
        assert await prompts.run(*entries("b", 1), None, at_once) == Tokens(Prompt(()))
        work.go.set()
        await asyncio.gather(*tasks)


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
async def test_a_cancelled_wait_frees_its_place(handed: bool) -> None:
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
