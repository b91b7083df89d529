"""Dead letters: requests that admission stopped retrying, kept for inspection."""

from __future__ import annotations

import msgspec

from .entries import RequestEntry
from .public import ErrorInfo, GenerateRequest


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the dead letters.

    Attributes:
        letter_id: Id of this letter.
        entry_id: The request's entry.
        request: The request.
        error: The cause.
        deaths: Number of lane failures during the request.
        died_ns: Time at which it became one, wall clock.
        model: The lane's model, in a deployment of several.
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
    """Return the dead letter of an admitted, and so readable, entry."""
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
