"""Long texts and constraints wait for threads, in turns of tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from nano_inference.bus import RequestEntry
from nano_inference.bus.messages import Prompt
from nano_inference.bus.public import GenerateRequest
from nano_inference.stages.admission.arrivals import Tokens
from nano_inference.stages.admission.long_prompts import AT_A_TIME, LONG_TEXT, LongPrompts

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


async def test_constraints_are_compiled_one_at_a_time_in_turns_of_tenants(work: Work) -> None:
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
    assert work.begun == ["a", "b", "c", "a", "a"]


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
