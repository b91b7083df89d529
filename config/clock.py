"""The clock of the shells: wall time that never jumps."""

from __future__ import annotations

import time

_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Return nanoseconds since the Unix epoch, monotonic: the wall clock is read only once.

    Setting the system's time neither shortens a budget nor makes a span negative.
    """
    return time.monotonic_ns() + _OFFSET_NS


def milliseconds(nanoseconds: int) -> str:
    """Return a duration as text, with two decimals below a second: "4.10", "12,345"."""
    value = nanoseconds / 1e6
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
