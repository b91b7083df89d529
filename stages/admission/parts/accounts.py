"""Accounts of time: instants before admission took a request."""

from __future__ import annotations

from ....bus.parts.accounts import RequestTimes
from . import Part, Resolved


class Accounts(Part):
    """Sends the time in the queue to streaming."""

    def opened(self, resolved: Resolved) -> RequestTimes | None:
        entry = resolved.entry
        if entry.queued_ns or entry.waited_ns:
            return RequestTimes(entry.queued_ns, entry.waited_ns)
        return None
