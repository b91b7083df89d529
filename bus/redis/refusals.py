"""Refusal of untaken entries: the terminal message is written before the entry is removed."""

from __future__ import annotations

from collections.abc import Sequence

from ..public import Completion
from .results import RedisResults


async def end_untaken(
    results: RedisResults, refusals: Sequence[Completion], epoch: int, *, claimed_too: bool = False
) -> list[str]:
    """Answer entries; return those whose request has ended.

    A lane claims the request's id before it works on an entry, and then finds this claim; where the
    lane was first, the request is the lane's. An entry without a request id may be taken at the
    same time: then this answer stands and the lane's output is dropped.

    Args:
        refusals: The entries' terminal messages.
        claimed_too: Answer also entries that are claimed but not begun. Where only refusals take
            entries, such a claim is left by a refusal that died.
    """
    claims = [(each.request_id, each.entry_id) for each in refusals]
    answers: list[tuple[str, Completion | None]] = []
    for refusal, owner in zip(refusals, await results.claim(claims), strict=True):
        if owner not in (None, refusal.entry_id):  # the id is another request's
            answers.append((refusal.entry_id, refusal))
        else:
            is_known = owner is None or claimed_too
            answers.append((refusal.request_id, refusal if is_known else None))
    ended = await results.answer(answers, epoch)
    return [
        refusal.entry_id
        for refusal, (key, _) in zip(refusals, answers, strict=True)
        if key in ended
    ]
