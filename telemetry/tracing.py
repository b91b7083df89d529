"""Spans, made from integer timestamps when a request leaves a stage.

Without an OTLP endpoint and a trace file no span is made, and a call costs one comparison.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased

from ..config import ConfigError, TelemetryConfig
from . import names
from .context import TraceContext, first_context, is_sampled
from .spans import Attributes, FinishedSpan, Kind, ReadableExporter, resource_of
from .trace_file import FileExporter

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

MOST_LINKS = 128
"""OpenTelemetry's limit per span."""

EXPORT_INTERVAL_MS = 1000
"""Default of OTEL_BSP_SCHEDULE_DELAY. A killed process loses the spans of one interval, so it is
shorter than OpenTelemetry's 5 s."""

MOST_BUFFERED = 16_384
"""Spans; default of OTEL_BSP_MAX_QUEUE_SIZE. OpenTelemetry's 2,048 overflow when 250 requests end
at once."""

MOST_AT_ONCE = 2048
"""Spans in one export; default of OTEL_BSP_MAX_EXPORT_BATCH_SIZE. Less than 1 MB, where collectors
take 4. One request costs as much as encoding a thousand spans, at every size."""

SHUTDOWN_MS = 1000
"""Time limit for the last export at the end of a process."""


class Tracing:
    """Makes the spans of one process. Each process sets up its own."""

    def __init__(
        self, provider: TracerProvider | None = None, processors: Sequence[SpanProcessor] = ()
    ) -> None:
        """Args: sampler and lifetime of the processors (None: no spans), and the processors."""
        self._provider = provider
        self.enabled = provider is not None
        # Independent of seeds that a program sets.
        self._random = random.Random()
        self._processors = tuple(processors)
        if provider is not None:
            # OTEL_TRACES_SAMPLER may name a sampler that ignores the parent.
            self._follows_parents = isinstance(provider.sampler, ParentBased)
            for processor in processors:
                provider.add_span_processor(processor)

    def span(
        self,
        name: str,
        parent: TraceContext,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        events: Sequence[tuple[str, int]] = (),
        links: Sequence[str] = (),
        error: str = "",
        own: TraceContext | None = None,
        kind: Kind = "internal",
    ) -> None:
        """Make a finished span unless its trace is not recorded; without a parent, a new trace.

        Args:
            name: The operation.
            parent: A valid context, such as the request's, or an empty one.
            start_ns: Since the Unix epoch.
            end_ns: Since the Unix epoch; the start if that is later.
            attributes: See `names`. Must not be changed afterwards.
            events: (name, timestamp) pairs.
            links: Valid traceparents of related traces; at most `MOST_LINKS` are kept.
            error: A stable error code.
            own: The context that `begin` or `begin_below` returned for this span, if other spans
                or processes have its ids.
            kind: See `FinishedSpan`.
        """
        if self._provider is None:
            return
        if own is None and parent.traceparent:
            if not self._records_below(parent):
                return
            trace, span_id = parent, self._new_span_id()
        else:
            own = own or self.begin()
            if own is parent or not own.sampled:
                return
            trace, span_id = parent if parent.traceparent else own, own.id_numbers[1]
        span = FinishedSpan(
            name,
            trace,
            span_id,
            own is trace,
            start_ns,
            end_ns if end_ns > start_ns else start_ns,
            {**attributes, names.ERROR_TYPE: error} if error else attributes,
            events,
            links[:MOST_LINKS] if links else (),
            error,
            kind,
        )
        for processor in self._processors:
            # Not the SDK's class, but it has the attributes that processors read.
            processor.on_end(span)  # type: ignore[arg-type]

    def begin(self, root: str = "", *, sampled: bool | None = None) -> TraceContext:
        """Return the context of a trace's first span; the span may be made later, or never.

        Args:
            root: Source of the ids: after a failure, any process that begins with the same root
                continues the same trace. Random ids if empty.
            sampled: Whether the trace is recorded; None: by `telemetry.trace_ratio`.
        """
        if self._provider is None:
            return TraceContext()
        bits = xxhash.xxh3_128_intdigest(root.encode()) if root else self._random.getrandbits(128)
        trace_id, span_id = bits or 1, bits & (2**64 - 1) or 1
        if sampled is None:
            sampled = self._wants(trace_id)
        return first_context(trace_id, span_id, sampled=sampled)

    def begin_below(self, parent: TraceContext) -> TraceContext:
        """Return the context of a span below a valid parent; the span may be made later, or never.

        Returns the parent itself if its trace is not recorded.
        """
        if self._provider is None or not self._records_below(parent):
            return parent
        return parent.child(self._new_span_id())

    def _records_below(self, parent: TraceContext) -> bool:
        return is_sampled(parent.traceparent) and (
            self._follows_parents or self._wants(parent.id_numbers[0])
        )

    def _new_span_id(self) -> int:
        return self._random.getrandbits(64) or 1

    def _wants(self, trace_id: int) -> bool:
        assert self._provider is not None
        decision = self._provider.sampler.should_sample(None, trace_id, "").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def flush(self) -> None:
        """Export the buffered spans, and wait."""
        if self._provider is not None:
            self._provider.force_flush()

    def shutdown(self) -> None:
        """Export the buffered spans, within `SHUTDOWN_MS`, and stop."""
        if self._provider is not None:
            self._provider.shutdown()


def endpoint_of(config: TelemetryConfig) -> str:
    """Return the OTLP endpoint in force; "" if none."""
    return config.otlp_endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")


def setup_tracing(
    config: TelemetryConfig,
    instance: str,
    exporter: SpanExporter | None = None,
    *,
    labels: Mapping[str, str] | None = None,
) -> Tracing:
    """Set up tracing for this process.

    Args:
        config: Names the service, the trace file and the OTLP endpoint.
        instance: The process's `service.instance.id`.
        exporter: Receives the spans in place of file and endpoint.
        labels: Further attributes of the process.

    Raises:
        ConfigError: The file can't be written, or grpcio is needed and not installed.
    """
    resource = resource_of(config, instance, labels)
    # The file first: it survives if the process is killed in the next moment.
    processors: list[SpanProcessor] = []
    if exporter is not None:
        processors.append(_batched(ReadableExporter(exporter, resource)))
    else:
        if config.trace_file:
            processors.append(SimpleSpanProcessor(_file_exporter(config.trace_file, resource)))
        if endpoint := endpoint_of(config):
            # Importing protobuf takes time.
            from .otlp import open_exporter

            processors.append(_batched(open_exporter(endpoint, config, resource)))
    if not processors:
        return Tracing()
    # None: by OTEL_TRACES_SAMPLER, else all.
    ratio = config.trace_ratio
    sampler = ParentBased(TraceIdRatioBased(ratio)) if ratio < 1 else None
    return Tracing(TracerProvider(sampler, resource), processors)


class _BatchProcessor(BatchSpanProcessor):
    """OpenTelemetry's, with a shorter time limit at shutdown than its 30 s."""

    def shutdown(self) -> None:
        """See BatchSpanProcessor."""
        self._batch_processor.shutdown(SHUTDOWN_MS)


def _batched(exporter: SpanExporter) -> SpanProcessor:
    given = os.environ
    queue, at_once = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
    # None: the variable, or OpenTelemetry's default. A batch is at most the queue.
    return _BatchProcessor(
        exporter,
        max_queue_size=None if given.get(queue) else MOST_BUFFERED,
        schedule_delay_millis=None if given.get("OTEL_BSP_SCHEDULE_DELAY") else EXPORT_INTERVAL_MS,
        max_export_batch_size=None if given.get(queue) or given.get(at_once) else MOST_AT_ONCE,
    )


def _file_exporter(path: str, resource: Resource) -> SpanExporter:
    try:
        return FileExporter(Path(path).expanduser(), resource)
    except OSError as error:
        raise ConfigError(
            f"telemetry.trace_file {path}: {error.strerror or error}", remedy="name another"
        ) from None
