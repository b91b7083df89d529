"""The file of answers: one line each, appended whole, so that a killed command loses none.

A line is that of OpenAI's output files. Its id has a digest of what was sent, by which a changed
input is refused. A cut-off last line, after a kill or on a full disk, is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

import msgspec

from ...config import ConfigError, shown
from ..terminal import complain
from .lines import Line

_ID = "batch_req_"
_BEGIN = b'{"id":"' + _ID.encode()


class Response(msgspec.Struct):
    """The response to a line that was sent."""

    status_code: int
    body: msgspec.Raw


class Fault(msgspec.Struct):
    """Why a line could not be sent."""

    code: str
    message: str


class Answer(msgspec.Struct):
    """An answer to a line, one of both."""

    id: str
    custom_id: str
    response: Response | None = None
    error: Fault | None = None

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.response is None or self.response.status_code >= 400


class Entry(NamedTuple):
    """An answer in the file.

    Attributes:
        offset: Where its line begins, in bytes.
        digest: That of `Line`.
        failed: Whether it is an error.
    """

    offset: int
    digest: str
    failed: bool


_decode = msgspec.json.Decoder(Answer).decode


def answer_to(line: Line, response: Response | None, error: Fault | None = None) -> Answer:
    """Return the answer to a line."""
    return Answer(f"{_ID}{line.digest}", line.id, response, error)


class Journal:
    """The answers of a file, which one command at a time has open. Use it as a context.

    Attributes:
        entries: The answers, by `custom_id`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            ConfigError: It can't be written, another command has it, or it has something else.
        """
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._reader: IO[bytes] | None = None
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb+", 0)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(
                    f"{path} is no file", remedy="name a file, by which to go on later"
                )
            self._lock()
            self._end = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.entries:
            self.path.unlink(missing_ok=True)
        self._close()

    def add(self, answer: Answer) -> None:
        """Append an answer. Raises ConfigError: there is no room; the file is as before."""
        line = msgspec.json.encode(answer) + b"\n"
        # Its buffer may have what stood after the end.
        self._forget_reader()
        try:
            self._file.seek(self._end)
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise _unwritable(self.path, error) from None
        self.entries[answer.custom_id] = Entry(
            self._end, answer.id.removeprefix(_ID), answer.failed
        )
        self._end += len(line)

    def remove(self, ids: Container[str]) -> None:
        """Remove answers."""
        kept = [id for id in self.entries if id not in ids]
        with replaced(self.path) as file:
            file.writelines(self.raw(id) for id in kept)
        self._reopen()

    def sort(self, ids: Iterable[str]) -> None:
        """Bring the answers into an order; ignored if there is no room for a second file."""
        order = list(ids)
        offsets = [self.entries[id].offset for id in order]
        if offsets == sorted(offsets):
            return
        try:
            with replaced(self.path) as file:
                file.writelines(map(self.raw, order))
        except ConfigError as error:
            complain(f"the answers are whole, and not in the order of the input: {error}")
            return
        self._reopen()

    def raw(self, id: str) -> bytes:
        """Return the line of an answer."""
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(self.entries[id].offset)
        return self._reader.readline()

    def read(self, id: str) -> Answer:
        """Return an answer."""
        return _decode(self.raw(id))

    def _close(self) -> None:
        self._file.close()
        self._forget_reader()

    def _forget_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another command writes {self.path}", remedy="wait for it, or end it"
            ) from None
        except OSError as error:  # a file system without locks
            raise _unwritable(self.path, error) from None

    def _reopen(self) -> None:
        """Go on in the file that has replaced this one."""
        self._close()
        self.__init__(self.path)  # type: ignore[misc]

    def _read(self) -> int:
        """Read the answers, and remove a cut-off last line; return the end."""
        end = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    raise self._foreign(number)
                self._file.truncate(end)
                break
            try:
                found = _decode(line)
            except (ValueError, RecursionError):
                raise self._foreign(number) from None
            if not found.id.startswith(_ID) or found.custom_id in self.entries:
                raise self._foreign(number)
            digest = found.id.removeprefix(_ID)
            self.entries[found.custom_id] = Entry(end, digest, found.failed)
            end += len(line)
        return end

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {number} is no answer of `batch run`",
            remedy="write to another file, or delete this one",
        )


def check_same(line: Line, entry: Entry, path: Path) -> None:
    """Raises ConfigError: an answer is one to another call than a line's."""
    if entry.digest != line.digest:
        raise ConfigError(
            f"{path} has an answer to another call with the custom_id {shown(line.id)}: the input, "
            "the template, the model or an option has changed",
            remedy="write to another file, or delete this one",
        )


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces another at the end of a block that ends well.

    Raises:
        ConfigError: It can't be written; the other file is as before.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        try:
            with new.open("wb") as file:
                yield file
            if path.exists():
                shutil.copymode(path, new)
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't write {path}: {error.strerror or error}",
        remedy="free space, or name another file; the same command goes on",
    )
