"""Dead letters: requests that were given up, kept for somebody to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .public import ErrorInfo, GenerateRequest

if TYPE_CHECKING:
    from .channel import RequestEntry


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was given up.

    Attributes:
        letter_id: Names this letter.
        entry_id: The request's entry, when it was in the queue.
        request: The request itself.
        error: Why it was given up.
        deaths: How often its lane failed.
        died_ns: When it was given up, wall clock.
        model: Whose lane it was in, in a deployment of several models.
    """

    letter_id: str = ""
    entry_id: str
    request: GenerateRequest
    error: ErrorInfo
    deaths: int
    died_ns: int
    traceparent: str = ""
    tracestate: str = ""
    model: str = ""


def dead_letter(
    entry: RequestEntry, error: ErrorInfo, deaths: int, now_ns: int, model: str = ""
) -> DeadLetter:
    """The dead letter of an entry that was let in, so that its request could be read."""
    assert isinstance(entry.request, GenerateRequest)
    return DeadLetter(
        entry_id=entry.entry_id,
        request=entry.request,
        error=error,
        deaths=deaths,
        died_ns=now_ns,
        traceparent=entry.traceparent,
        tracestate=entry.tracestate,
        model=model,
    )
