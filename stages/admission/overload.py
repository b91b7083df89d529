"""How fast requests finish, and what a client is told that comes when too many wait."""

from __future__ import annotations

from ...bus.channel import RequestEntry
from ...bus.public import Completion, ErrorInfo, Timings
from .checks import request_id_of

WINDOW_S = 30
"""Seconds over which the rate is measured."""

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0


class FinishRate:
    """Counts requests that finish, by the second, over the last `WINDOW_S`."""

    def __init__(self) -> None:
        # Second to requests, the oldest first.
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Seconds that are remembered."""
        return len(self._counts)

    def finished(self, now_ns: int) -> None:
        """One more has finished."""
        second = now_ns // 1_000_000_000
        if second not in self._counts:
            self._forget(second)
            self._counts[second] = 0
        self._counts[second] += 1

    def per_s(self, now_ns: int) -> float:
        """Requests per second."""
        self._forget(now_ns // 1_000_000_000)
        return sum(self._counts.values()) / WINDOW_S

    def retry_after_s(self, waiting: int, now_ns: int) -> float:
        """`waiting / rate`: how long as many requests as wait now take to finish.

        Kept between `SHORTEST_RETRY_S` and `LONGEST_RETRY_S`. The rate is this lane's alone, so
        with others the hint is too cautious.
        """
        rate = self.per_s(now_ns)
        seconds = waiting / rate if rate else LONGEST_RETRY_S
        return round(min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds)), 1)

    def _forget(self, second: int) -> None:
        oldest = second - WINDOW_S + 1
        self._counts = {at: count for at, count in self._counts.items() if at >= oldest}


def overloaded(entry: RequestEntry, retry_after_s: float, model: str, now_ns: int) -> Completion:
    """The terminal message of a request that came when too many waited."""
    return Completion(
        request_id=request_id_of(entry),
        entry_id=entry.entry_id,
        model=model,
        status="error",
        error=ErrorInfo(
            code="overloaded",
            message=f"too many requests wait; try again in {retry_after_s:g} s",
            retry_after_s=retry_after_s,
        ),
        timings=Timings(finished_ns=now_ns),
    )
