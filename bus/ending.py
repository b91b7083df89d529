"""Ending entries of the requests stream that nobody works on any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .public import Completion

if TYPE_CHECKING:
    from .channel import RequestEntry, ResultStreams


async def end_entries(
    results: ResultStreams,
    entries: Sequence[RequestEntry],
    answer: Callable[[RequestEntry], Completion],
    epoch: int,
) -> list[str]:
    """Writes the terminal message of each entry that has none.

    From then on nobody writes more about it: what an older epoch still had to say is refused.

    Returns:
        The entries that have ended, which can be forgotten.
    """
    answers = [answer(entry) for entry in entries]
    claims = [(each.request_id, each.entry_id) for each in answers]
    # Of a request whose id is another's the answer goes to the stream that its entry names.
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
