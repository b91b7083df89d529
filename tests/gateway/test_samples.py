"""A sample's pieces are what has come of it, however its reader takes them."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from nano_inference.bus.public import Completion, GenerateRequest, Output
from nano_inference.config import SamplingParams
from nano_inference.gateway.samples import MOST_UNSENT, Piece, Pieces, joined

from .fake import completion
from .openai.made import LOGPROBS, TEXTS, TOKENS, chunk, told, tops

LIMIT_S = 20
REQUEST = GenerateRequest(request_id="r", sampling=SamplingParams(logprobs=2))


async def taken(outputs: list[Output], held: anyio.Event | None = None) -> list[Piece]:
    """What a reader gets that takes no second piece before it may."""
    pieces, found = Pieces(), []

    async def take(piece: Piece) -> None:
        found.append(piece)
        if held is not None:
            await held.wait()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(pieces.send_all, take)
            for output in outputs:
                pieces.put(output)
                await anyio.wait_all_tasks_blocked()
            if held is not None:
                held.set()
            pieces.close()
    return found


def ended() -> Completion:
    return completion(REQUEST, told(REQUEST, 0))


WHOLE = Piece(text="".join(TEXTS), token_ids=TOKENS, logprobs=LOGPROBS, top_logprobs=tops(2))


@pytest.mark.parametrize("chunks", range(4))
async def test_what_chunks_did_not_tell_comes_with_the_end(chunks: int) -> None:
    outputs: list[Output] = [chunk(REQUEST, 0, place) for place in range(chunks)]
    found = await taken([*outputs, ended()])
    assert joined(found) == WHOLE
    # An end that tells nothing new is no piece.
    assert len(found) == min(3, chunks + 1)


async def test_what_came_while_nobody_took_is_one_piece() -> None:
    outputs: list[Output] = [chunk(REQUEST, 0, place) for place in range(3)]
    first, second = await taken([*outputs, ended()], anyio.Event())
    assert first.token_ids == TOKENS[:1]
    assert second.token_ids == TOKENS[1:]
    assert joined([first, second]) == WHOLE


async def test_what_nobody_takes_has_its_bound() -> None:
    pieces, held = Pieces(), anyio.Event()
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
            pieces.put(full)
            await pieces.room()
        pieces.close()

    async def take(piece: Piece) -> None:
        await held.wait()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(pieces.send_all, take)
            group.start_soon(put_all)
            await anyio.wait_all_tasks_blocked()
            # Two are being sent, one fills the room, and one is above it.
            assert put == 4
            assert pieces.unsent == 2 * MOST_UNSENT
            held.set()
    assert put == 9
    assert pieces.unsent == 0


async def test_one_that_never_began_has_no_pieces() -> None:
    none = Completion(request_id="r", entry_id="1-0", status="cancelled")
    assert await taken([none]) == []
