"""A limit on log lines of the same kind: what one client can cause would fill a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

MOST_LINES = 20
"""Lines of one event within `WINDOW_S`."""

WINDOW_S = 10.0


class _Window:
    """The lines of one event since a moment."""

    __slots__ = ("lines", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.lines = 0


class Suppressed(NamedTuple):
    """Lines of one event that were left out."""

    event: Hashable
    lines: int


class LogRate:
    """Admits `MOST_LINES` lines of an event in `WINDOW_S`, and counts the others.

    Events are texts of the code, of which there are few: nothing here grows with what clients send.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: the clock, monotonic and in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[Hashable, _Window] = {}
        # Events with suppressed lines of which nothing has been said.
        self._unsaid: set[Hashable] = set()

    def admits(self, event: Hashable) -> bool:
        """Count a line of this event; return whether it is to be written."""
        with self._lock:
            now_s = self._clock()
            window = self._windows.get(event)
            if window is None or (event not in self._unsaid and now_s - window.start_s >= WINDOW_S):
                window = self._windows[event] = _Window(now_s)
            window.lines += 1
            if window.lines <= MOST_LINES:
                return True
            self._unsaid.add(event)
            return False

    def ended(self) -> list[Suppressed]:
        """Remove the windows that have ended with suppressed lines, and return their counts."""
        if not self._unsaid:
            return []
        with self._lock:
            now_s = self._clock()
            over = [
                each for each in self._unsaid if now_s - self._windows[each].start_s >= WINDOW_S
            ]
            self._unsaid.difference_update(over)
            return [Suppressed(each, self._windows.pop(each).lines - MOST_LINES) for each in over]
