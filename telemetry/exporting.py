"""Spans on their way to a receiver that may be away: no end waits for it, and one line says so."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from ..config import cut
from ..config.logger import get_logger

SHUTDOWN_MS = 1000
"""What the last spans may take at the end of a process."""

# A line of them for each attempt, with what Python's or gRPC's exceptions say.
_LIBRARY = tuple(
    f"opentelemetry.exporter.otlp.proto.{name}" for name in ("http.trace_exporter", "grpc.exporter")
)

# How the system calls it, out of exceptions within exceptions.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\"\\)]+)")
_MOST_REASON = 200

_exporting = threading.local()


class SoonEnded(BatchSpanProcessor):
    """OpenTelemetry's, which waits 30 seconds for its last spans, but not as long."""

    def shutdown(self) -> None:
        """See BatchSpanProcessor."""
        self._batch_processor.shutdown(SHUTDOWN_MS)


class ToldExporter(SpanExporter):
    """Says once that spans can't be exported, in place of the library, and once that they can."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """Args: what exports, and where to."""
        self._exporter = exporter
        parts = urlsplit(endpoint)
        self._receiver = parts.netloc.rpartition("@")[2] or parts.path
        self._failing = False
        for name in _LIBRARY:
            logging.getLogger(name).addFilter(_HELD_BACK)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        _exporting.by = self
        try:
            result = self._exporter.export(spans)
        finally:
            _exporting.by = None
        if result is not SpanExportResult.SUCCESS:
            self.failed("the receiver does not take them")
        elif self._failing:
            self._failing = False
            get_logger().warning("spans_exported_again", receiver=self._receiver)
        return result

    def failed(self, reason: str) -> None:
        """An attempt has failed; the library may try again."""
        if self._failing:
            return
        self._failing = True
        found = _SYSTEM_ERROR.search(reason)
        get_logger().warning(
            "spans_not_exported",
            receiver=self._receiver,
            reason=found[1] if found else cut(reason, _MOST_REASON),
        )

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()


class _HeldBack(logging.Filter):
    """Keeps back what the library says while it exports for us; others may use it, too."""

    def filter(self, record: logging.LogRecord) -> bool:
        exporter: ToldExporter | None = getattr(_exporting, "by", None)
        if exporter is None:
            return True
        if record.levelno >= logging.WARNING:
            exporter.failed(record.getMessage())
        return False


_HELD_BACK = _HeldBack()
