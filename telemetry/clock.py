"""The clock of the shells: wall time for people, monotonic for deadlines, in one number."""

from __future__ import annotations

import time

_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since the Unix epoch that never jump, because the wall clock is read only once.

    So a budget is not cut short, and a span is not negative, when the system's time is set.
    """
    return time.monotonic_ns() + _OFFSET_NS
