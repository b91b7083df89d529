"""Spans to an OTLP receiver, by OpenTelemetry's exporters.

They read the environment's variables:
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..config import ConfigError, TelemetryConfig, cut
from ..config.logger import get_logger
from .spans import FinishedSpan, ReadableExporter

_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# The system's message in the text of nested exceptions.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\"\\)]+)")
_URL = re.compile(r" with url: \S+")
_MOST_REASON = 200


def open_exporter(endpoint: str, config: TelemetryConfig, resource: Resource) -> OtlpExporter:
    """Return an exporter of finished spans.

    Args:
        endpoint: The receiver's address, as `endpoint_of` returns it.
        config: The protocol, and the address if it is not of the environment.
        resource: The attributes of this process.

    Raises:
        ConfigError: grpcio is needed and not installed, or a variable has no valid value.
    """
    protocol = config.otlp_protocol
    if protocol == "auto":
        named = next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), "")
        protocol = "grpc" if named == "grpc" else "http"
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_admits)
    parts = urlsplit(endpoint)
    receiver = parts.netloc.rpartition("@")[2] or parts.path
    if protocol == "grpc":
        return OtlpExporter(_grpc(config), resource, receiver)
    # Importing protobuf takes time.
    from .span_messages import span_message

    return OtlpExporter(_http(config, resource), resource, receiver, span_message)


def _http(config: TelemetryConfig, resource: Resource) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from .span_messages import Request

    request = Request(resource)

    class Exporter(OTLPSpanExporter):
        """The library's, for spans as messages: its own encoder takes four times as long."""

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            sent = self._client.export(request.encoded(spans))
            return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE

    base = config.otlp_endpoint
    with _refused_values():
        return Exporter(f"{base.rstrip('/')}/v1/traces" if base else None)


def _grpc(config: TelemetryConfig) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "telemetry.otlp_protocol is 'grpc', which needs grpcio: "
            "pip install 'nano-inference[grpc]', or export over 'http'"
        ) from None
    with _refused_values():
        return OTLPSpanExporter(config.otlp_endpoint or None)


@contextmanager
def _refused_values() -> Iterator[None]:
    """Raise ConfigError for the library's exceptions, which have no class in common."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"a variable OTEL_EXPORTER_OTLP_* can't be used: {error}") from None


class OtlpExporter(ReadableExporter):
    """Exports finished spans.

    In place of the library's log lines, one for each attempt, the log has one line when the
    receiver is away, and one when it is back.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        receiver: str,
        convert: Callable[[FinishedSpan], Any] | None = None,
    ) -> None:
        """Args: the library's exporter; the attributes of this process; a name for the log; returns
        a span as the exporter takes it."""
        super().__init__(exporter, resource, convert)
        self._receiver = receiver
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. Retries within OTEL_EXPORTER_OTLP_TIMEOUT, 10 s by default."""
        thread = threading.get_ident()
        _EXPORTING[thread] = self
        try:
            result = super().export(spans)
        finally:
            del _EXPORTING[thread]
        if self._failing and result is SpanExportResult.SUCCESS:
            self._failing = False
            get_logger().warning("spans_exported_again", receiver=self._receiver)
        return result

    def report(self, text: str) -> None:
        """Log the library's line about a failed attempt, unless an earlier one was logged."""
        if not self._failing:
            self._failing = True
            found = _SYSTEM_ERROR.search(text)
            reason = found[1] if found else cut(_URL.sub("", text), _MOST_REASON)
            get_logger().warning("spans_not_exported", receiver=self._receiver, reason=reason)


_EXPORTING: dict[int, OtlpExporter] = {}
"""Exporters at work, by thread."""


def _admits(record: logging.LogRecord) -> bool:
    """Filter the library's lines: those of other exporters in this process are admitted."""
    exporter = _EXPORTING.get(record.thread or 0)
    if exporter is not None:
        exporter.report(record.getMessage())
    return exporter is None
