"""The audit log: a JSON line for each call, and for each change to the policy or the models."""

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

from ...config import ConfigError, PolicyConfig, line_safe
from ...config.logger import get_logger
from ..call import Call, Texts

# O_NONBLOCK: a pipe without a reader is an error, and doesn't block.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o600
"""Readable by the gateway's user only."""


class AuditFile:
    """A file that several processes append to, and that is rotated when it is large.

    It is opened for each batch of lines, so that an external rotation takes effect.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        """A file larger than `max_bytes` becomes `<path>.1`, the one before it `<path>.2`; at most
        `files` are kept."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = files

    def append(self, lines: Sequence[bytes]) -> int:
        """Append lines, whole or not at all, while they fit the file. A line larger than
        `max_bytes` gets a file of its own. Without lines, only open the file.

        Returns:
            The number of lines written; at least one, if there are any.

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
            self._rotate()
        return self.append(lines)

    def _fitting(self, lines: Sequence[bytes], size: int) -> int:
        for number, line in enumerate(lines):
            if size and size + len(line) > self._max_bytes:
                return number
            size += len(line)
        return len(lines)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open and lock the file."""
        while True:
            file = os.open(self._path, _FLAGS, _MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # The previous holder of the lock may have rotated it.
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

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _write_whole(file: int, data: bytes, size: int | None) -> None:
    """Write all or nothing. `size`: that of the file before, if it can be truncated."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        if size is not None:
            os.ftruncate(file, size)
        raise


MOST_WAITING = 10_000
"""Lines in the queue; more are lost."""

# Credentials, wherever a client has put them: in a prompt, or in the id of a call.
_SECRETS = re.compile(
    rb"(ni-[0-9a-f]{12}-)[A-Za-z0-9_-]{43}|(eyJ)[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"
)

_RETRY_S = 1.0
# Lines are batched for so long, since opening the file costs more than writing a line.
_GATHER_S = 0.05
_CLOSE_S = 5.0

Fields = dict[str, Any]


class AuditLog:
    """Writes lines of JSON, in order, on a thread of its own.

    Attributes:
        shows_text: Whether lines have texts, and not their hashes alone.
    """

    def __init__(
        self, config: PolicyConfig, on_lost: Callable[[int], None] = lambda number: None
    ) -> None:
        """`on_lost`: called, from any thread, with the number of lines that were lost."""
        self._on_lost = on_lost
        self._file = AuditFile(Path(config.audit_file), config.audit_max_bytes, config.audit_files)
        self._path = config.audit_file
        self._key = config.audit_key.encode()
        self.shows_text = config.audit_text
        self._refuses_when_full = config.audit_when_full == "refuse"
        self._failing = False
        self._closing = threading.Event()
        self._lines: queue.SimpleQueue[tuple[Fields, dict[str, Texts]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._log = get_logger()

    def open(self) -> None:
        """Start the thread.

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
        """Write the queued lines, as far as that succeeds within `_CLOSE_S`."""
        if self._thread.is_alive():
            self._closing.set()
            self._lines.put(None)
            self._thread.join(_CLOSE_S)

    @property
    def refuses(self) -> bool:
        """Whether requests must be refused, because lines can't be written."""
        return self._refuses_when_full and (self._failing or self._is_full)

    def write(self, event: str, fields: Fields, texts: dict[str, Texts] | None = None) -> None:
        """Queue a line.

        Args:
            event: The event's name.
            fields: The event's fields.
            texts: Functions that return texts, called on the thread. A line has their hash under
                `<name>_hmac`, and the texts under `<name>` if the settings say so.
        """
        if self._is_full:
            self._on_lost(1)
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._lines.put(({"time": now, "event": event} | fields, texts or {}))

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
        """Wait for lines, or for the next attempt at unwritten ones. Returns False after the last
        line."""
        try:
            lines = [self._lines.get(timeout=_RETRY_S if unwritten else None)]
        except queue.Empty:
            return True
        self._closing.wait(_GATHER_S)
        lines += [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        unwritten += [self._encoded(*line) for line in lines if line is not None]
        return None not in lines

    def _fail(self, error: OSError, unwritten: list[bytes]) -> None:
        """Keep the lines only if requests are refused meanwhile; else they could pile up."""
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

    def _encoded(self, fields: Fields, texts: dict[str, Texts]) -> bytes:
        fields = dict(fields)
        for name, read in texts.items():
            if found := list(read()):
                fields[f"{name}_hmac"] = text_hash(self._key, found)
                if self.shows_text:
                    fields[name] = found
        return line_safe(_SECRETS.sub(rb"\1\2...", msgspec.json.encode(fields))) + b"\n"


def text_hash(key: bytes, texts: Sequence[str]) -> str:
    """Return the HMAC-SHA-256 of a text in UTF-8, as 64 hex digits; of several texts, that of their
    concatenated hashes. Without the key, guesses can't be tested."""

    def digest(data: bytes) -> str:
        return hmac.new(key, data, hashlib.sha256).hexdigest()

    digests = [digest(text.encode(errors="surrogatepass")) for text in texts]
    return digests[0] if len(digests) == 1 else digest("".join(digests).encode())


def audit_call(log: AuditLog, call: Call, route: str, fields: Fields) -> None:
    """Write a line about a call that needs a scope; as `OnCall`."""
    caller, account = call.caller, call.account
    if call.needed == "nothing":
        return
    about = {
        "key_id": caller.key_id,
        "key_name": caller.name,
        "tenant": account.tenant or caller.tenant,
        # The policy's route has the full name, also within a model's own application.
        "route": call.route or route,
        "model": account.model,
        "code": call.code or account.code,
        "complete": account.complete,
    }
    log.write("call", fields | about | account.usage, account.texts)


def audit_change(log: AuditLog | None, call: Call, event: str, of: str, now: Any) -> None:
    """Write a line about a change that an administrator made over HTTP."""
    if log is not None:
        caller = call.caller
        fields = {
            "key_id": caller.key_id,
            "key_name": caller.name,
            "tenant": caller.tenant,
            "call_id": call.id,
            "changed": of,
            "now": now,
        }
        log.write(event, fields)
