"""A cached result is fetched once for concurrent readers."""

from __future__ import annotations

import asyncio

import pytest

from nano_inference.config import BusError
from nano_inference.gateway.serving.lane_state import Recent

LIMIT_S = 20


class Question:
    """Answers with how often it was asked, when it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.error: BusError | None = None

    async def ask(self) -> int:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.asked


@pytest.fixture
async def question() -> Question:
    return Question()


async def test_concurrent_readers_share_one_call(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    asking = [asyncio.create_task(recent.get()) for _ in range(5)]
    while not question.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    question.gate.set()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*asking) == [1] * 5
    assert await recent.get() == 1


async def test_an_expired_result_is_not_returned(question: Question) -> None:
    recent = Recent(question.ask, 0.0)
    question.gate.set()
    assert [await recent.get() for _ in range(3)] == [1, 2, 3]


async def test_an_error_is_cached(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    question.error = BusError("Redis is away")
    question.gate.set()
    for _ in range(3):
        with pytest.raises(BusError, match="Redis is away"):
            await recent.get()
    assert question.asked == 1


async def test_a_cancelled_call_is_repeated_for_the_next_reader(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    first, second = (asyncio.create_task(recent.get()) for _ in range(2))
    while not question.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    question.gate.set()
    async with asyncio.timeout(LIMIT_S):
        assert await second == 2
