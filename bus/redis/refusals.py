"""Refusing what nobody has taken: the terminal message first, and only then the entry goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..public import Completion
from .results import RedisResults


class Refusal(NamedTuple):
    """An entry that nobody has taken, and its answer."""

    entry_id: str
    answer: Completion


async def end_untaken(
    results: RedisResults, refusals: Sequence[Refusal], epoch: int, *, claimed_too: bool = False
) -> list[str]:
    """Answers entries; returns those whose request has ended.

    Whoever takes an entry claims its request's id first, and finds that we have; where he was
    first, it is his. An entry without an id of its own may be taken at the very moment: then
    the answer stands, and what he writes is dropped.

    Args:
        claimed_too: Whether to answer also what somebody has claimed for the entry, unless he has
            begun: where nobody else takes entries, it was one who refuses, and has died of it.
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
