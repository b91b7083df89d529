"""Finished spans: cheap to make; what else they are is made of them where they are exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import ClassVar, Literal

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from .context import TraceContext

Attributes = Mapping[str, str | int | float | tuple[str, ...]]

Kind = Literal["internal", "server"]
"""OpenTelemetry's: work of a program, and its answer to a client's call."""

_RECORDED = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))

SCOPE = InstrumentationScope("nano_inference")


class FinishedSpan(msgspec.Struct, frozen=True, gc=False):
    """A span that is made in one go, when all of it is known.

    The SDK's own spans are made to be changed by several threads while they last, which costs
    twenty times as much. This one is what OpenTelemetry's processors carry to our exporters.

    Attributes:
        name: What was done.
        trace: Its parent's context; of the first span of a trace its own. Valid.
        span_id: 64 bits, not all of them 0.
        is_first: Whether it has no parent.
        start_ns: Since the Unix epoch.
        end_ns: Since the Unix epoch; not before the start.
        attributes: Not to be changed any more.
        events: Names and timestamps.
        links: Traceparents of other traces that belong to it; all valid.
        error: What its status says; "" when all went well.
        kind: "server" of what answers a call from outside.
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

    # All that processors look at before they pass a span on.
    context: ClassVar[SimpleNamespace] = _RECORDED

    @property
    def own(self) -> TraceContext:
        """Its own context."""
        return self.trace if self.is_first else self.trace.child(self.span_id)

    def readable(self, resource: Resource) -> ReadableSpan:
        """The same, as exporters know spans.

        Args:
            resource: The process that it comes from.
        """
        return ReadableSpan(
            name=self.name,
            context=self.own.span_context,
            parent=None if self.is_first else self.trace.span_context,
            resource=resource,
            attributes=self.attributes,
            events=[Event(name, timestamp=at_ns) for name, at_ns in self.events],
            links=[Link(TraceContext(link).span_context) for link in self.links],
            kind=SpanKind[self.kind.upper()],
            status=Status(StatusCode.ERROR, self.error) if self.error else Status(),
            start_time=self.start_ns,
            end_time=self.end_ns,
            instrumentation_scope=SCOPE,
        )


class ReadableExporter(SpanExporter):
    """Takes finished spans to an exporter that knows nothing of them."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        return self._exporter.export([span.readable(self._resource) for span in finished(spans)])

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()


def finished(spans: Sequence[object]) -> Iterator[FinishedSpan]:
    """The spans that a processor hands to an exporter, as what they are."""
    return (span for span in spans if isinstance(span, FinishedSpan))
