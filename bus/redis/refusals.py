"""Refusal of untaken entries: the terminal message is written before the entry is removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..public import Completion
from .results import RedisResults


class Refusal(NamedTuple):
    """An untaken entry and its terminal message."""

    entry_id: str
    answer: Completion


async def end_untaken(
    results: RedisResults, refusals: Sequence[Refusal], epoch: int, *, claimed_too: bool = False
) -> list[str]:
    """Answer entries; return those whose request has ended.

    A lane claims the request's id before it works on an entry, and then finds this claim; where the
    lane was first, the request is the lane's. An entry without a request id may be taken at the
    same
    time: then this answer stands and the lane's output is dropped.

    Args:
        claimed_too: Answer also entries that are claimed but not begun. Where only refusals take
            entries, such a claim is left by a refusal that died.
    """
    owners = await results.claim([(each.answer.request_id, each.entry_id) for each in refusals])
    answers: list[tuple[str, Completion | None]] = []
    for (entry_id, completion), owner in zip(refusals, owners, strict=True):
        if owner is None:
            answers.append((completion.request_id, completion))
        elif owner == entry_id:
            known = completion if claimed_too else None
            answers.append((completion.request_id, known))
        else:  # the id is another request's
            answers.append((entry_id, completion))
    ended = await results.answer(answers, epoch)
    return [
        refusal.entry_id
        for refusal, (key, _) in zip(refusals, answers, strict=True)
        if key in ended
    ]
