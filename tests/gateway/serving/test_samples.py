"""A sample's chunks, for fast and slow readers."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import SamplingParams
from nano_inference.gateway.serving.samples import MOST_UNSENT, SampleChunks

from ..fake import completion
from ..made import chunk, told

REQUEST = GenerateRequest(request_id="r", sampling=SamplingParams(logprobs=2))


async def taken(outputs: list[Output], held: anyio.Event | None = None) -> list[list[Output]]:
    """Return the batches of outputs that a reader gets; `held`: it takes no second batch before."""
    found: list[list[Output]] = []

    async def take(new: Sequence[Output]) -> None:
        found.append(list(new))
        if held is not None:
            await held.wait()

    chunks = SampleChunks(take)
    async with anyio.create_task_group() as group:
        group.start_soon(chunks.send_all)
        for output in outputs:
            chunks.put(0, output)
            await anyio.wait_all_tasks_blocked()
        if held is not None:
            held.set()
        chunks.close()
    return found


def made(number: int) -> list[Output]:
    return [chunk(REQUEST, 0, place) for place in range(number)]


@pytest.mark.parametrize("number", range(4))
async def test_chunks_are_sent_one_by_one(number: int) -> None:
    end = completion(REQUEST, told(REQUEST, 0))
    assert await taken([*made(number), end]) == [[each] for each in made(number)]


async def test_buffered_chunks_are_sent_together() -> None:
    first, second = await taken(made(3), anyio.Event())
    assert (first, second) == (made(1), made(3)[1:])


async def test_unread_outputs_are_bounded() -> None:
    held = anyio.Event()
    full = chunk(REQUEST, 0, 0)
    number = MOST_UNSENT
    full = msgspec.structs.replace(
        full, token_ids=(7,) * number, logprobs=(-1.0,) * number, top_logprobs=None
    )
    put = 0

    async def put_all() -> None:
        nonlocal put
        while put < 9:
            put += 1
            chunks.put(0, full)
            await chunks.room()
        chunks.close()

    async def take(new: Sequence[Output]) -> None:
        await held.wait()

    chunks = SampleChunks(take)
    async with anyio.create_task_group() as group:
        group.start_soon(chunks.send_all)
        group.start_soon(put_all)
        await anyio.wait_all_tasks_blocked()
        # Two are being sent, one fills the buffer, and one is above it.
        assert put == 4
        assert chunks.unsent == 2 * MOST_UNSENT
        held.set()
    assert put == 9
    assert chunks.unsent == 0
