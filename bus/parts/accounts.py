"""Time accounts: instants of a request before admission took it."""

from __future__ import annotations

from ..sections import Section


class RequestTimes(Section, frozen=True):
    """In RequestOpened: the time before admission, and of a failure.

    Attributes:
        queued_ns, waited_ns: As in RequestEntry.
        down_since_ns: When the lane failed, if the request is opened again; else 0.
    """

    queued_ns: int = 0
    waited_ns: int = 0
    down_since_ns: int = 0
