"""Until when requests have time."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

LEFTOVERS_KEPT = 256
"""Deadlines of requests that have ended that may be left, before they are looked through."""


class Deadlines:
    """Deadlines of requests, earliest first. Those of requests that were done in time stay a while.

    `living` holds the ids of the requests that have not ended.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, str, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def clear(self) -> None:
        """Forgets all."""
        self._heap.clear()

    def add(
        self, deadline_ns: int, request_id: str, entry_id: str, living: Collection[str]
    ) -> None:
        """A request has time until then."""
        heapq.heappush(self._heap, (deadline_ns, request_id, entry_id))
        if len(self._heap) > 2 * len(living) + LEFTOVERS_KEPT:
            self._heap = [each for each in self._heap if each[1] in living]
            heapq.heapify(self._heap)

    def passed(self, now_ns: int) -> Iterator[tuple[str, str]]:
        """(request id, entry id) of those whose time is over; each comes once."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)[1:]

    def next_ns(self) -> int | None:
        """The earliest; None when there is none."""
        return self._heap[0][0] if self._heap else None
