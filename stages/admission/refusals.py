"""Errors of requests that are given up or shed, and the rate at which requests finish."""

from __future__ import annotations

from ...bus.entries import RequestEntry, queued_only
from ...bus.public import Completion, ErrorInfo
from ...config import BusError, NanoInferenceError, shown
from .checks import request_id_of

MESSAGE_TOO_LARGE = "message_too_large"

GIVEN_UP_CODES = ("lane_failed", MESSAGE_TOO_LARGE, NanoInferenceError.code)
"""The usual codes of dead letters."""


def is_of_the_entry(error: Exception) -> bool:
    """Return whether an error is caused by one entry, not by the bus or the lane.

    The bus may come back, and a replaced lane must end. Any other error would come again with the
    same entry, at each start of this stage and of every successor.
    """
    return not isinstance(error, BusError) or error.code == MESSAGE_TOO_LARGE


def why_given_up(error: Exception) -> ErrorInfo:
    """Return the error of an entry that can't be processed."""
    kept = "its entry is kept among the dead letters"
    if isinstance(error, BusError):
        message = f"the request can't be handed on: {error.message}. Shorten it, or lower n; {kept}"
        return ErrorInfo(code=error.code, message=message)
    code = error.code if isinstance(error, NanoInferenceError) else NanoInferenceError.code
    cause = f"{type(error).__name__}: {shown(str(error))}"
    return ErrorInfo(code=code, message=f"the request could not be handled ({cause}); {kept}")


def why_dead(deaths: int) -> ErrorInfo:
    """Return the error of a request that may have crashed its lane."""
    message = (
        f"the lane failed {deaths} times during this request, so it is given up; its entry is "
        "kept among the dead letters"
    )
    return ErrorInfo(code="lane_failed", message=message)


WINDOW_S = 30
"""Seconds over which the rate is measured."""

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0


class FinishRate:
    """Number of requests that finished in the last `WINDOW_S` seconds, by second."""

    def __init__(self) -> None:
        # Second to requests, the oldest first.
        self._counts: dict[int, int] = {}

    def finished(self, now_ns: int) -> None:
        """Count a finished request."""
        second = now_ns // 1_000_000_000
        if second not in self._counts:
            self._forget(second)
            self._counts[second] = 0
        self._counts[second] += 1

    def per_s(self, now_ns: int) -> float:
        """Return requests per second."""
        self._forget(now_ns // 1_000_000_000)
        return sum(self._counts.values()) / WINDOW_S

    def retry_after_s(self, waiting: int, now_ns: int) -> float:
        """Return `waiting / rate`, between `SHORTEST_RETRY_S` and `LONGEST_RETRY_S`.

        The rate is this lane's alone, so with several lanes the hint is too long.
        """
        rate = self.per_s(now_ns)
        seconds = waiting / rate if rate else LONGEST_RETRY_S
        return round(min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds)), 1)

    def _forget(self, second: int) -> None:
        oldest = second - WINDOW_S + 1
        self._counts = {at: count for at, count in self._counts.items() if at >= oldest}


def overloaded(entry: RequestEntry, retry_after_s: float, model: str, now_ns: int) -> Completion:
    """Return the terminal message of a request that is shed."""
    usage, timings = queued_only(entry, now_ns)
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
        usage=usage,
        timings=timings,
    )
