"""Spans, made after the fact from integer timestamps, when a request leaves a stage.

Without an OTLP endpoint there is no exporter, no span is made, and a call costs one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..config import TelemetryConfig
from . import names

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Attributes = Mapping[str, str | int | float | Sequence[str]]

_PROPAGATOR = TraceContextTextMapPropagator()


class TraceContext:
    """A W3C trace context: the two headers, as strings."""

    __slots__ = ("traceparent", "tracestate")

    def __init__(self, traceparent: str = "", tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" when there is no valid context."""
        span_context = trace.get_current_span(self.extract()).get_span_context()
        return format(span_context.trace_id, "032x") if span_context.is_valid else ""

    def extract(self) -> Context:
        """As OpenTelemetry's own context; an invalid traceparent gives an empty one."""
        carrier = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return _PROPAGATOR.extract(carrier, context=Context())


class Tracing:
    """Makes the spans of one process. Each process sets up its own."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("nano_inference") if provider else None

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracer is not None

    def span(
        self,
        name: str,
        parent: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        events: Sequence[tuple[str, int]] = (),
        error: str = "",
    ) -> TraceContext:
        """Makes one finished span; without a valid parent it begins a trace.

        Args:
            name: What was done.
            parent: The context that the request came with.
            start_ns: Since the Unix epoch.
            end_ns: Since the Unix epoch; not before the start, or it is taken as equal to it.
            attributes: See `names`.
            events: (name, timestamp) pairs.
            error: The stable code, when it went wrong.

        Returns:
            The context in which the span's children belong; `parent` when tracing is off.
        """
        if self._tracer is None:
            return parent
        span = self._tracer.start_span(
            name, context=parent.extract(), start_time=start_ns, attributes=dict(attributes)
        )
        for event, at_ns in events:
            span.add_event(event, timestamp=at_ns)
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(end_time=max(start_ns, end_ns))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span, Context()))
        return TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def shutdown(self) -> None:
        """Exports what is buffered."""
        if self._provider is not None:
            self._provider.shutdown()


def endpoint_of(config: TelemetryConfig) -> str:
    """The OTLP endpoint in force, or "" when there is none."""
    return config.otlp_endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")


def setup_tracing(
    config: TelemetryConfig, instance: str, exporter: SpanExporter | None = None
) -> Tracing:
    """Tracing for this process: to `exporter` if given, else to the OTLP endpoint if there is one.

    Args:
        config: Names the service and the endpoint.
        instance: Tells this process from its siblings, as `service.instance.id`.
        exporter: For tests and tools that look at the spans themselves.
    """
    if exporter is None:
        if not endpoint_of(config):
            return Tracing(None)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # The exporter reads the variables itself; an endpoint from our settings is a base address.
        address = config.otlp_endpoint.rstrip("/")
        exporter = OTLPSpanExporter(endpoint=f"{address}/v1/traces" if address else None)
    resource = Resource.create(
        {names.SERVICE_NAME: config.service_name, names.SERVICE_INSTANCE_ID: instance}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
