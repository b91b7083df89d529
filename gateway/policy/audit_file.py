"""The file of the audit log: lines are put behind others whole or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# A pipe that nobody reads is an error, and holds up nobody.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o600
"""Nobody else reads who asked for what."""


class AuditFile:
    """A file that several processes may write, and that is put aside when it is large.

    It is opened for each batch of lines, so that whoever moves it away has the next ones in a new
    file.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        """Args: a larger one becomes `<path>.1`, that before it `<path>.2`, `files` in all."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = files

    def append(self, lines: Sequence[bytes]) -> int:
        """Writes lines, as far as there is room in this file. A larger one than the file may have
        has one of its own.

        Returns:
            How many; at least one, if there are any. Without any the file is opened, and that is
            all.

        Raises:
            OSError: None was written.
        """
        with self._opened() as file:
            if not lines:
                return 0
            found = os.fstat(file)
            regular = stat.S_ISREG(found.st_mode)
            size = found.st_size if regular else 0
            number = self._fitting(lines, size) if regular else len(lines)
            if number:
                _write_whole(file, b"".join(lines[:number]), size if regular else None)
                return number
            self._put_aside()
        return self.append(lines)

    def _fitting(self, lines: Sequence[bytes], size: int) -> int:
        for number, line in enumerate(lines):
            if size and size + len(line) > self._max_bytes:
                return number
            size += len(line)
        return len(lines)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, which nobody else writes or moves meanwhile."""
        while True:
            file = os.open(self._path, _FLAGS, _MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Whoever had the lock before may have put it aside.
                if self._is_current(file):
                    yield file
                    return
            finally:
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _put_aside(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _write_whole(file: int, data: bytes, size: int | None) -> None:
    """Args: `size` is that of the file, where it can be cut to that again."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        if size is not None:
            os.ftruncate(file, size)
        raise
