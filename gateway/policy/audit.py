"""The audit log: who has asked for what, and who has changed what."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import queue
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from ...config import ConfigError, PolicyConfig
from ...config.logger import get_logger
from ..server.http import call_id_of
from ..serving.account import Texts
from .caller import caller_of

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


MOST_WAITING = 10_000
"""Lines that wait to be written; beyond that they are lost."""

# What lets somebody in, wherever a client has put it: in a prompt, or in the name of a call.
_SECRETS = re.compile(
    rb"(ni-[0-9a-f]{12}-)[A-Za-z0-9_-]{43}|(eyJ)[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"
)

_RETRY_S = 1.0
# Lines are gathered for so long: to open the file costs more than to write one.
_GATHER_S = 0.05
_CLOSE_S = 5.0

Fields = dict[str, Any]


class _Line(msgspec.Struct, frozen=True):
    """A line before it is put together."""

    fields: Fields
    texts: dict[str, Texts]


class AuditLog:
    """Writes lines of JSON on a thread of its own, in the order in which they came."""

    def __init__(
        self, config: PolicyConfig, on_lost: Callable[[int], None] = lambda number: None
    ) -> None:
        """`on_lost`: told, from any thread, of lines that will never be written."""
        self._on_lost = on_lost
        self._file = AuditFile(Path(config.audit_file), config.audit_max_bytes, config.audit_files)
        self._path = config.audit_file
        self._key = config.audit_key.encode()
        self._shows_text = config.audit_text
        self._refuses_when_full = config.audit_when_full == "refuse"
        self._failing = False
        self._closing = threading.Event()
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._log = get_logger()

    def open(self) -> None:
        """Begins.

        Raises:
            ConfigError: The file can't be opened.
        """
        try:
            self._file.append([])
        except OSError as error:
            raise ConfigError(
                f"the audit log can't be written to {self._path}: {error.strerror}; name another "
                "policy.audit_file"
            ) from None
        self._thread.start()

    def close(self) -> None:
        """Returns when what was to be written is, as far as it can be, and soon enough."""
        if self._thread.is_alive():
            self._closing.set()
            self._lines.put(None)
            self._thread.join(_CLOSE_S)

    @property
    def refuses(self) -> bool:
        """Whether no request is to be served, because lines can't be written."""
        return self._refuses_when_full and (self._failing or self._is_full)

    def write(self, event: str, fields: Fields, texts: dict[str, Texts] | None = None) -> None:
        """Has a line written, sooner or later.

        Args:
            event: What it tells of.
            fields: What it tells.
            texts: Of which there is a hash under `<name>_hmac`, and the texts themselves under
                `<name>` where the settings say so. There is none of no texts.
        """
        if self._is_full:
            self._on_lost(1)
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._lines.put(_Line({"time": now, "event": event} | fields, texts or {}))

    @property
    def _is_full(self) -> bool:
        return self._lines.qsize() >= MOST_WAITING

    # --- on the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        unwritten: list[bytes] = []
        going_on = True
        while going_on:
            going_on = self._take(unwritten)
            try:
                while unwritten:
                    del unwritten[: self._file.append(unwritten)]
                    self._recover()
            except OSError as error:
                self._fail(error, unwritten)

    def _take(self, unwritten: list[bytes]) -> bool:
        """Waits for lines, or until what could not be written is to be tried again. Returns whether
        more may come."""
        try:
            lines = [self._lines.get(timeout=_RETRY_S if unwritten else None)]
        except queue.Empty:
            return True
        self._closing.wait(_GATHER_S)
        lines += [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        unwritten += [self._encoded(line) for line in lines if line is not None]
        return None not in lines

    def _fail(self, error: OSError, unwritten: list[bytes]) -> None:
        """Where nobody is served meanwhile, those of whoever was are kept until they can be."""
        kept = MOST_WAITING if self._refuses_when_full else 0
        if lost := len(unwritten[kept:]):
            self._on_lost(lost)
            del unwritten[kept:]
        if not self._failing:
            self._failing = True
            self._log.error("audit_not_written", file=self._path, error=error.strerror)

    def _recover(self) -> None:
        if self._failing:
            self._failing = False
            self._log.warning("audit_written_again", file=self._path)

    def _encoded(self, line: _Line) -> bytes:
        fields = dict(line.fields)
        for name, texts in line.texts.items():
            told = list(texts())
            if told:
                fields[f"{name}_hmac"] = text_hash(self._key, told)
                if self._shows_text:
                    fields[name] = told
        return _SECRETS.sub(rb"\1\2...", msgspec.json.encode(fields)) + b"\n"


def text_hash(key: bytes, texts: Sequence[str]) -> str:
    """HMAC-SHA-256 of a text in UTF-8; of several, of the hashes of each in hex, one behind the
    other. Who has not the key can't try what it may have been.

    Returns:
        64 hex digits.
    """
    digests = [hmac.new(key, _bytes(text), hashlib.sha256).hexdigest() for text in texts]
    if len(digests) == 1:
        return digests[0]
    return hmac.new(key, "".join(digests).encode(), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def audit_change(log: AuditLog | None, request: Request, event: str, of: str, now: Any) -> None:
    """Write a line about a change that an administrator made over HTTP."""
    if log is not None:
        caller = caller_of(request)
        fields = {
            "key_id": caller.key_id,
            "key_name": caller.name,
            "tenant": caller.tenant,
            "call_id": call_id_of(request.scope),
            "changed": of,
            "now": now,
        }
        log.write(event, fields)
