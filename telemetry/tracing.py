"""Spans, made after the fact from integer timestamps, when a request leaves a stage.

Without an OTLP endpoint and a trace file there is no exporter, no span is made, and a call costs
one comparison.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased

from ..config import ConfigError, TelemetryConfig
from . import names
from .context import TraceContext, first_context, is_sampled
from .exporting import SoonEnded, ToldExporter
from .spans import Attributes, FinishedSpan, Kind, ReadableExporter
from .trace_file import FileExporter

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

MOST_LINKS = 128
"""OpenTelemetry drops what is beyond."""

EXPORT_INTERVAL_MS = 1000
"""Unless OTEL_BSP_SCHEDULE_DELAY says otherwise: what a process that is killed has not exported is
lost, so a second of it and not OpenTelemetry's five."""

MOST_BUFFERED = 16_384
"""Spans, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise. Requests end in crowds: OpenTelemetry's
2,048 would be full when 250 end at once, and what comes then is lost."""

MOST_AT_ONCE = 2048
"""Spans in one export, unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE says otherwise: less than 1 MB, where
collectors take 4. To send costs as much as to encode a thousand, whatever is sent."""


class Tracing:
    """Makes the spans of one process. Each process sets up its own."""

    def __init__(
        self, provider: TracerProvider | None = None, processors: Sequence[SpanProcessor] = ()
    ) -> None:
        """Args: what decides, flushes and ends, and what takes the spans; nothing: none are
        made."""
        self._provider = provider
        # Whether spans go anywhere.
        self.enabled = provider is not None
        # Of this process alone, and with no seed that somebody sets.
        self._random = random.Random()
        self._processors = tuple(processors)
        if provider is not None:
            # Samplers that the environment names need not follow the parent.
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
        """Makes one finished span, or none where it is not recorded; without a parent it begins a
        trace.

        Args:
            name: What was done.
            parent: The context that the request came with, known to be valid, or an empty one.
            start_ns: Since the Unix epoch.
            end_ns: Since the Unix epoch; not before the start, or it is taken as equal to it.
            attributes: See `names`. Not to be changed any more.
            events: (name, timestamp) pairs.
            links: Traceparents of other traces that belong to it, known to be valid; at most
                `MOST_LINKS` of them are kept.
            error: The stable code, when it went wrong.
            own: What `begin` or `begin_below` gave for this span, where others know its ids.
            kind: "server" of what answers a call from outside.
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
            # No span of the SDK's, but all that its processors ask for.
            processor.on_end(span)  # type: ignore[arg-type]

    def begin(self, root: str = "", *, sampled: bool | None = None) -> TraceContext:
        """The ids of a trace's first span; the span itself may be made later, or not at all.

        Args:
            root: What the ids are made from. Whoever begins with the same again after a failure,
                in whatever process, goes on with the same trace.
            sampled: Whether the trace is recorded; None: as `telemetry.trace_ratio` decides.
        """
        if self._provider is None:
            return TraceContext()
        bits = xxhash.xxh3_128_intdigest(root.encode()) if root else self._random.getrandbits(128)
        trace_id, span_id = bits or 1, bits & (2**64 - 1) or 1
        if sampled is None:
            sampled = self._wants(trace_id)
        return first_context(trace_id, span_id, sampled=sampled)

    def begin_below(self, parent: TraceContext) -> TraceContext:
        """The ids of a span below a parent, which is known to be valid; made later, or not at all.

        Returns:
            The parent itself where the span is not recorded.
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
    config: TelemetryConfig,
    instance: str,
    exporter: SpanExporter | None = None,
    *,
    labels: Mapping[str, str] | None = None,
) -> Tracing:
    """Tracing for this process: to `exporter` if given, else to the trace file and the OTLP
    endpoint, if there are any.

    Args:
        config: Names the service, the file and the endpoint.
        instance: Tells this process from its siblings, as `service.instance.id`.
        exporter: For tests and tools that look at the spans themselves.
        labels: Attributes that hold for all of this process.

    Raises:
        ConfigError: The file can't be written, or gRPC is wanted and its packages are missing.
    """
    resource = Resource.create(
        {
            names.SERVICE_NAME: config.service_name,
            names.SERVICE_INSTANCE_ID: instance,
            **(labels or {}),
        }
    )
    # The file first: what is written there stays when the process is killed in the next moment.
    processors: list[SpanProcessor] = []
    if exporter is not None:
        processors.append(_batched(ReadableExporter(exporter, resource)))
    else:
        if config.trace_file:
            processors.append(SimpleSpanProcessor(_file_exporter(config.trace_file, resource)))
        if endpoint_of(config):
            # Only here, so that who exports nothing does not wait for the import of protobuf.
            from .otlp import otlp_exporter

            exporter = ToldExporter(otlp_exporter(config, resource), endpoint_of(config))
            processors.append(_batched(exporter))
    if not processors:
        return Tracing()
    # None: as OTEL_TRACES_SAMPLER says, or all.
    ratio = config.trace_ratio
    sampler = ParentBased(TraceIdRatioBased(ratio)) if ratio < 1 else None
    return Tracing(TracerProvider(sampler, resource), processors)


def _batched(exporter: SpanExporter) -> SpanProcessor:
    given = os.environ
    queue, at_once = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
    # None: as the variable says, or as OpenTelemetry has it. No more at once than are kept.
    return SoonEnded(
        exporter,
        max_queue_size=None if given.get(queue) else MOST_BUFFERED,
        schedule_delay_millis=None if given.get("OTEL_BSP_SCHEDULE_DELAY") else EXPORT_INTERVAL_MS,
        max_export_batch_size=None if given.get(queue) or given.get(at_once) else MOST_AT_ONCE,
    )


def _file_exporter(path: str, resource: Resource) -> SpanExporter:
    try:
        return FileExporter(Path(path).expanduser(), resource)
    except OSError as error:
        raise ConfigError(f"telemetry.trace_file {path}: {error.strerror or error}") from None
