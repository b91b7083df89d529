"""What a gateway tells of itself, read back."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.config import TelemetryConfig
from nano_inference.gateway.measures import Measures
from nano_inference.telemetry import Metrics, setup_tracing
from nano_inference.telemetry.instruments import GATEWAY_REFUSED, Instrument


class Told:
    """Measures, with all that was recorded."""

    def __init__(self, telemetry: TelemetryConfig | None = None) -> None:
        self._reader = InMemoryMetricReader()
        self._exporter = InMemorySpanExporter()
        self._tracing = setup_tracing(telemetry or TelemetryConfig(), "here", self._exporter)
        self.measures = Measures(self._tracing, Metrics(MeterProvider([self._reader])))

    def spans(self) -> list[ReadableSpan]:
        self._tracing.flush()
        return list(self._exporter.get_finished_spans())

    def values(self, instrument: Instrument) -> dict[tuple[str, ...], float]:
        """By the values of the labels, in the instrument's order; of a histogram how many."""
        self.measures.tell()
        return {
            tuple(str(point.attributes[name]) for name in instrument.attributes): (
                point.count if isinstance(point, HistogramDataPoint) else point.value
            )
            for point in self._points(instrument.name)
        }

    def refused(self) -> dict[str, float]:
        """How many were, by reason; those of which there are none are left out."""
        found = self.values(GATEWAY_REFUSED)
        return {reason: number for (reason,), number in found.items() if number}

    def _points(self, name: str) -> Iterator[object]:
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        yield from metric.data.data_points


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Of its trace, its own, its parent's ("" for none), as the headers have them."""
    parent = format(span.parent.span_id, "016x") if span.parent else ""
    return format(span.context.trace_id, "032x"), format(span.context.span_id, "016x"), parent
