"""Finished spans: cheap to make, and converted where they are exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from ..config import TelemetryConfig
from ..config.logger import get_logger
from . import names
from .context import TraceContext

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

Kind = Literal["internal", "server", "client", "producer"]
"""OpenTelemetry's span kinds that occur here."""


@cache
def scope() -> InstrumentationScope:
    """Return the origin of all spans and metrics: this package, and its names' conventions."""
    return InstrumentationScope("nano_inference", version("nano-inference"), names.SCHEMA_URL)


class FinishedSpan(msgspec.Struct, frozen=True, gc=False):
    """A span that is complete when it is made.

    The SDK's own spans can be changed by several threads until they end, which costs twenty times
    as much. OpenTelemetry's processors carry this class to our exporters.

    Attributes:
        name: The operation.
        trace: Its parent's context; its own for the first span of a trace. Valid.
        span_id: 64 bits, not all 0.
        is_first: Whether it has no parent.
        start_ns: Since the Unix epoch.
        end_ns: Since the Unix epoch; not before the start.
        attributes: Must not be changed.
        events: Names and timestamps.
        links: Valid traceparents of related traces.
        error: Description of its error status; "" for success.
        kind: "server" answers a call from outside, "client" awaits a request's outputs,
            "producer" publishes one.
    """

    name: str
    trace: TraceContext
    span_id: int
    is_first: bool
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: Sequence[tuple[str, int]]
    links: Sequence[str]
    error: str
    kind: Kind = "internal"

    # The only attribute that processors read.
    context: ClassVar = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))

    def check(self) -> None:
        """Raise ValueError if its trace's ids are none, or OTLP can't hold its times."""
        if not self.trace.is_valid:
            raise ValueError("its trace's ids are none")
        if not 0 <= self.start_ns <= self.end_ns < 2**64:
            raise ValueError("its times are no unsigned integers of 64 bits")

    def readable(self, resource: Resource) -> ReadableSpan:
        """Return the span as the SDK's class. `resource`: the process that made it.

        Raises:
            ValueError: As `check`.
        """
        self.check()
        own = self.trace if self.is_first else self.trace.child(self.span_id)
        return ReadableSpan(
            name=self.name,
            context=own.span_context,
            parent=None if self.is_first else self.trace.span_context,
            resource=resource,
            attributes=self.attributes,
            events=[Event(name, timestamp=at_ns) for name, at_ns in self.events],
            links=[Link(TraceContext(link).span_context) for link in self.links],
            kind=SpanKind[self.kind.upper()],
            status=Status(StatusCode.ERROR, self.error) if self.error else Status(),
            start_time=self.start_ns,
            end_time=self.end_ns,
            instrumentation_scope=scope(),
        )


class ReadableExporter(SpanExporter):
    """Passes finished spans to an exporter of the SDK's spans."""

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        convert: Callable[[FinishedSpan], Any] | None = None,
    ) -> None:
        """`convert`: returns a span as the exporter takes it, in place of `readable`."""
        self._exporter = exporter
        self._convert = convert or (lambda span: span.readable(resource))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. A span that can't be converted is left out, with a log line."""
        readable = []
        for span in finished(spans):
            try:
                readable.append(self._convert(span))
            except ValueError as error:
                get_logger().warning("span_not_encoded", name=span.name, reason=str(error))
        return self._exporter.export(readable)

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()


def resource_of(
    config: TelemetryConfig, instance: str, labels: Mapping[str, str] | None = None
) -> Resource:
    """Return a process's attributes: its service, its `service.instance.id`, and more labels."""
    own = {
        names.SERVICE_NAME: config.service_name,
        names.SERVICE_VERSION: scope().version,
        names.SERVICE_INSTANCE_ID: instance,
    }
    return Resource.create({**own, **(labels or {})}, names.SCHEMA_URL)


def finished(spans: Sequence[object]) -> Iterator[FinishedSpan]:
    """Return the spans that a processor passes to an exporter, with their real type."""
    return (span for span in spans if isinstance(span, FinishedSpan))
