"""What a child of `up` prints, fit to be shown: no line is long, and none steers a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MOST_LINE_BYTES = 1 << 16
"""What is kept of a line. Our own are shorter (`telemetry.logs.MOST_LOG_BYTES`)."""

# What starts with ESC: a control sequence, an operating system command, or something shorter.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class Line(NamedTuple):
    """A line, without its end.

    Attributes:
        kept: Its beginning.
        left_out: How many bytes followed.
    """

    kept: bytes
    left_out: int

    def __str__(self) -> str:
        more = f"... ({self.left_out} more bytes left out)" if self.left_out else ""
        return fit_to_show(self.kept.decode(errors="replace")) + more


class Lines:
    """Makes lines of bytes as they arrive, in memory for one line of `most` bytes."""

    def __init__(self, most: int = MOST_LINE_BYTES) -> None:
        self._most = most
        self._kept = bytearray()
        self._left_out = 0

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines that end in these bytes."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield self._take()
        self._add(rest)

    def end(self) -> Iterator[Line]:
        """The last line, when nothing ended it."""
        if self._kept or self._left_out:
            yield self._take()

    def _add(self, part: bytes) -> None:
        kept = part[: self._most - len(self._kept)]
        self._kept += kept
        self._left_out += len(part) - len(kept)

    def _take(self) -> Line:
        line = Line(bytes(self._kept), self._left_out)
        self._kept.clear()
        self._left_out = 0
        return line


def fit_to_show(text: str) -> str:
    """A text without colours and other control codes. A child writes none, for it has no terminal;
    what is there comes from elsewhere."""
    return _CONTROLS.sub(" ", _ESCAPES.sub("", text)).rstrip(" ")
