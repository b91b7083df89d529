"""Ending of requests stream entries that no lane processes any more."""

from __future__ import annotations

from collections.abc import Sequence

from .channel import ResultStreams
from .entries import Answer, RequestEntry
from .public import Completion


async def end_entries(
    results: ResultStreams, entries: Sequence[RequestEntry], answer: Answer, epoch: int
) -> list[str]:
    """Write the terminal message of each entry without one.

    Writes of older epochs are refused from then on.

    Returns:
        The ended entries, which can be forgotten.
    """
    answers = [answer(entry) for entry in entries]
    claims = [(each.request_id, each.entry_id) for each in answers]
    # If the request's id belongs to another entry, the answer goes to the stream of the entry's id.
    keys = [
        key if owner in (None, entry_id) else entry_id
        for (key, entry_id), owner in zip(claims, await results.claim(claims), strict=True)
    ]
    written = await results.recover(keys, epoch)
    unanswered = [
        (key, [completion])
        for key, completion, outputs in zip(keys, answers, written, strict=True)
        if not (outputs and isinstance(outputs[-1], Completion))
    ]
    refused = await results.deliver(unanswered, epoch) if unanswered else set()
    return [entry.entry_id for entry, key in zip(entries, keys, strict=True) if key not in refused]
