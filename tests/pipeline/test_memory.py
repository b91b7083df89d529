"""A pipeline that has answered thousands of requests holds no more than when it was warm."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from nano_inference import Completion, GenerateRequest, Pipeline, SamplingParams
from nano_inference.bus import messages

from .conftest import MakeConfig

pytestmark = pytest.mark.slow

WARM, MEASURED, CONCURRENT = 1000, 4000, 250
LIMIT_S = 240

# Of 4,000 requests. The allocator alone gives or takes a megabyte or two; keeping a request's
# messages, about 4 KB of them, would take 16.
MOST_GROWTH_BYTES = 8 << 20
# What happens to be on its way differs by a few; a leak of one for each request is thousands.
MOST_NEW_OBJECTS = 100

MESSAGES = frozenset(
    value
    for value in vars(messages).values()
    if isinstance(value, type) and value.__module__ == messages.__name__
)


class Held(NamedTuple):
    """What the process holds at a moment when no request is under way."""

    resident_bytes: int
    messages: Counter[str]
    tasks: int


def held() -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    alive = Counter(type(it).__name__ for it in gc.get_objects() if type(it) in MESSAGES)
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), alive, len(asyncio.all_tasks()))


def request(number: int) -> GenerateRequest:
    """Of each eight: one with two samples, one that is refused, one that is soon cancelled."""
    kind = number % 8
    return GenerateRequest(
        request_id=f"r{number}",
        prompt=f"{number} + {number % 7} =",
        n=2 if kind == 1 else 1,
        model="unknown" if kind == 2 else "",
        stream=number % 2 == 0,
        sampling=SamplingParams(temperature=0, max_tokens=100 if kind == 3 else 4),
    )


async def answer(pipeline: Pipeline, number: int) -> str:
    """Runs a request to its end, whatever that is."""
    waiting = asyncio.create_task(pipeline.complete(request(number)))
    if number % 8 == 3:
        await asyncio.sleep(0)
        await pipeline.client.cancel(f"r{number}")
    completion: Completion = await waiting
    return completion.error.code if completion.error else completion.status


async def answer_all(pipeline: Pipeline, numbers: range) -> Counter[str]:
    ends: Counter[str] = Counter()
    for start in range(numbers.start, numbers.stop, CONCURRENT):
        some = range(start, min(start + CONCURRENT, numbers.stop))
        ends.update(await asyncio.gather(*(answer(pipeline, number) for number in some)))
    return ends


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
async def test_nothing_is_left_of_5000_requests(make_config: MakeConfig) -> None:
    # The cache is so small that it is full after the warm-up.
    config = make_config(engine__kv_cache_bytes=8 << 20)
    async with Pipeline(config) as pipeline, asyncio.timeout(LIMIT_S):
        await answer_all(pipeline, range(WARM))
        before = held()
        ends = await answer_all(pipeline, range(WARM, WARM + MEASURED))
        after = held()
    assert ends.total() == MEASURED
    assert ends["unknown_model"] == MEASURED // 8
    assert ends["done"] + ends["cancelled"] == MEASURED - MEASURED // 8
    growth = after.resident_bytes - before.resident_bytes
    print(f"{growth / 1e6=:.2f} {before=} {after=} {ends=}")  # noqa: T201
    assert (after.messages - before.messages).total() < MOST_NEW_OBJECTS
    assert after.tasks <= before.tasks
    assert growth < MOST_GROWTH_BYTES, f"{growth / 1e6:.1f} MB more after {MEASURED} requests"
