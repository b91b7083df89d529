"""Spans, made after the fact from integer timestamps, when a request leaves a stage.

Without an OTLP endpoint and a trace file there is no exporter, no span is made, and a call costs
one comparison.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import xxhash
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..config import ConfigError, TelemetryConfig
from . import names
from .trace_file import FileExporter

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

MOST_LINKS = 128
"""OpenTelemetry drops what is beyond."""

Attributes = Mapping[str, str | int | float | Sequence[str]]

_PROPAGATOR = TraceContextTextMapPropagator()


class TraceContext:
    """A W3C trace context: the two headers, as strings."""

    def __init__(self, traceparent: str = "", tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate

    @cached_property
    def span_context(self) -> trace.SpanContext:
        """As OpenTelemetry has it; not valid when there is no valid context."""
        return trace.get_current_span(self.context).get_span_context()

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" when there is no valid context."""
        context = self.span_context
        return format(context.trace_id, "032x") if context.is_valid else ""

    @property
    def log_ids(self) -> dict[str, str]:
        """What log lines of the request carry, by the names that OpenTelemetry gives them.

        https://opentelemetry.io/docs/specs/otel/compatibility/logging_trace_context/
        """
        context = self.span_context
        if not context.is_valid:
            return {}
        return {"trace_id": self.trace_id, "span_id": format(context.span_id, "016x")}

    @property
    def sampled(self) -> bool:
        """Whether its beginner wants it recorded; told from the text alone, which is quick."""
        return self.traceparent[-2:] in _SAMPLED

    @cached_property
    def context(self) -> Context:
        """As OpenTelemetry's own context; an invalid traceparent gives an empty one."""
        carrier = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return _PROPAGATOR.extract(carrier, context=Context())


# The last two digits of a traceparent are flags, of which the lowest bit says "sampled".
_SAMPLED = frozenset(format(flags, "02x") for flags in range(1, 256, 2))


class _Ids(RandomIdGenerator):
    """Random ids, or those that were asked for."""

    wanted: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.wanted[0] if self.wanted else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.wanted[1] if self.wanted else super().generate_span_id()


class Tracing:
    """Makes the spans of one process. Each process sets up its own."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._ids = provider.id_generator if provider else None
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
        links: Sequence[TraceContext] = (),
        error: str = "",
        root: str = "",
    ) -> TraceContext:
        """Makes one finished span; without a valid parent it begins a trace.

        Whether a trace is recorded is decided where it begins, by `telemetry.trace_ratio`.

        Args:
            name: What was done.
            parent: The context that the request came with.
            start_ns: Since the Unix epoch.
            end_ns: Since the Unix epoch; not before the start, or it is taken as equal to it.
            attributes: See `names`.
            events: (name, timestamp) pairs.
            links: Other traces that belong to it; at most `MOST_LINKS` of them are kept.
            root: When it begins a trace: what its ids are made from. Whoever makes this span again
                after a failure, in whatever process, goes on with the same trace.
            error: The stable code, when it went wrong.

        Returns:
            The context in which the span's children belong; `parent` when tracing is off.
        """
        if self._tracer is None or (parent.trace_id and not parent.sampled):
            return parent
        if root and isinstance(self._ids, _Ids) and not parent.trace_id:
            digest = xxhash.xxh3_128_intdigest(root.encode())
            self._ids.wanted = (digest or 1, digest & (2**64 - 1) or 1)
        span = self._tracer.start_span(
            name,
            context=parent.context,
            start_time=start_ns,
            attributes=dict(attributes),
            links=[trace.Link(each.span_context) for each in links[:MOST_LINKS]],
        )
        if isinstance(self._ids, _Ids):
            self._ids.wanted = None
        for event, at_ns in events:
            span.add_event(event, timestamp=at_ns)
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(end_time=max(start_ns, end_ns))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span, Context()))
        return TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def flush(self) -> None:
        """Exports what is buffered; waits until that is done."""
        if self._provider is not None:
            self._provider.force_flush()

    def shutdown(self) -> None:
        """Exports what is buffered, and ends."""
        if self._provider is not None:
            self._provider.shutdown()


def endpoint_of(config: TelemetryConfig) -> str:
    """The OTLP endpoint in force, or "" when there is none."""
    return config.otlp_endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")


def setup_tracing(
    config: TelemetryConfig, instance: str, exporter: SpanExporter | None = None
) -> Tracing:
    """Tracing for this process: to `exporter` if given, else to the trace file and the OTLP
    endpoint, if there are any.

    Args:
        config: Names the service, the file and the endpoint.
        instance: Tells this process from its siblings, as `service.instance.id`.
        exporter: For tests and tools that look at the spans themselves.

    Raises:
        ConfigError: The file can't be written, or gRPC is wanted and its packages are missing.
    """
    # The file first: what is written there stays when the process is killed in the next moment.
    processors: list[SimpleSpanProcessor | BatchSpanProcessor] = []
    if exporter is not None:
        processors.append(BatchSpanProcessor(exporter))
    else:
        if config.trace_file:
            processors.append(SimpleSpanProcessor(_file_exporter(config.trace_file)))
        if endpoint_of(config):
            processors.append(BatchSpanProcessor(_otlp_exporter(config)))
    if not processors:
        return Tracing(None)
    resource = Resource.create(
        {names.SERVICE_NAME: config.service_name, names.SERVICE_INSTANCE_ID: instance}
    )
    # None: as OTEL_TRACES_SAMPLER says, or all.
    ratio = config.trace_ratio
    sampler = ParentBased(TraceIdRatioBased(ratio)) if ratio < 1 else None
    provider = TracerProvider(sampler, resource, id_generator=_Ids())
    for processor in processors:
        provider.add_span_processor(processor)
    return Tracing(provider)


def _file_exporter(path: str) -> SpanExporter:
    try:
        return FileExporter(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"telemetry.trace_file {path}: {error.strerror or error}") from None


def _otlp_exporter(config: TelemetryConfig) -> SpanExporter:
    """The exporter reads the variables itself; an endpoint from our settings is a base address."""
    address = config.otlp_endpoint.rstrip("/")
    protocol = config.otlp_protocol
    if protocol == "auto":
        wanted = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "")
        protocol = "grpc" if wanted == "grpc" else "http"
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc
        except ImportError:
            raise ConfigError(
                "telemetry.otlp_protocol is 'grpc', whose packages are missing: "
                "pip install 'nano-inference[grpc]', or export over 'http'"
            ) from None
        insecure = True if address.startswith("http://") else None
        return over_grpc.OTLPSpanExporter(endpoint=address or None, insecure=insecure)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    return over_http.OTLPSpanExporter(endpoint=f"{address}/v1/traces" if address else None)
