"""The file of a log. Lines that can't be written are dropped and counted."""

from __future__ import annotations

import io
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final, TextIO

UNWRITABLE: Final = "unwritable"
SUPPRESSED: Final = "suppressed"

dropped_lines = {UNWRITABLE: 0, SUPPRESSED: 0}
"""Log lines that this process dropped, by reason."""

BAR_CLEARED = "\r\x1b[K"
"""Written before lines on a terminal whose last line is a progress bar, which is drawn anew."""

_WAIT_S = 0.05
"""Time limit for a line on a full pipe, once in `_WAIT_EVERY_S`: the caller is an event loop."""

_WAIT_EVERY_S = 1.0


class LogOutput(io.TextIOBase):
    """A text file of whole lines whose `write` never raises and waits at most `_WAIT_S`.

    A full disk, a closed pipe or a full pipe drops lines and does not affect the caller.

    Attributes:
        has_bar: Whether a progress bar is shown below the lines.
        copy: Takes the lines of all outputs of this process, too; never raises.
    """

    encoding = "utf-8"
    has_bar: ClassVar[bool] = False
    copy: ClassVar[Callable[[str], None] | None] = None

    def __init__(
        self, stream: TextIO, notice: Callable[[int], str], *, copied: bool = True
    ) -> None:
        """Make an output.

        Args:
            stream: The destination.
            notice: Renders a line with the number of dropped lines.
            copied: Whether `copy` takes its lines. Not for what a terminal shows for a moment.
        """
        self._stream = stream
        self._copied = copied
        self._notice = notice
        self._lock = threading.Lock()
        self._dropped = 0
        # Whether the last line was written only in part.
        self._is_torn = False
        self._next_wait_s = 0.0

    def write(self, text: str) -> int:
        """Write whole lines, or drop and count them."""
        with self._lock:
            if self._copied and LogOutput.copy is not None:
                LogOutput.copy(text)
            before = "\n" if self._is_torn else ""
            if LogOutput.has_bar and self.isatty():
                before = BAR_CLEARED
            if self._dropped:
                before += self._notice(self._dropped)
            if self._put(f"{before}{text}"):
                self._dropped = 0
            else:
                lines = max(1, text.count("\n"))
                self._dropped += lines
                dropped_lines[UNWRITABLE] += lines
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return not self._stream.closed and self._stream.isatty()

    def _put(self, text: str) -> bool:
        """Return whether all was written."""
        try:
            # Read each time: once the stream is closed, its number may be another file's.
            file = self._stream.fileno()
        except (OSError, ValueError):
            return self._put_without_file(text)
        # Python's buffer would keep text that a full disk has refused, and write it later.
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            # A writable pipe takes PIPE_BUF bytes without blocking.
            most = len(left) if stat.S_ISREG(os.fstat(file).st_mode) else select.PIPE_BUF
            while left and self._is_writable(file):
                left = left[os.write(file, left[:most]) :]
                self._is_torn = bool(left)
        except OSError:
            return False
        return not left

    def _put_without_file(self, text: str) -> bool:
        """Write to a stream without a descriptor, such as a test's."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True

    def _is_writable(self, file: int) -> bool:
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        if poll.poll(0):
            return True
        now_s = time.monotonic()
        if now_s < self._next_wait_s:
            return False
        self._next_wait_s = now_s + _WAIT_EVERY_S
        return bool(poll.poll(_WAIT_S * 1000))
