"""The audit log: who has asked for what, and who has changed what."""

from __future__ import annotations

import hashlib
import hmac
import queue
import re
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...config import ConfigError, PolicyConfig
from ...config.logger import get_logger
from ..serving.account import Texts
from .audit_file import AuditFile

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
