"""Metrics and spans, read back as they were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from nano_inference.telemetry import Metrics
from nano_inference.telemetry.instruments import Instrument
from nano_inference.telemetry.measurements import Measurements

ByLabels = dict[tuple[str, ...], float]


class Kept(SpanExporter):
    """Keeps spans as our exporters get them."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


class Measured:
    """Metrics that stay in memory."""

    def __init__(self) -> None:
        self._measurements = Measurements(Resource.create())
        self.metrics = Metrics(self._measurements)

    def values(self, instrument: Instrument) -> ByLabels:
        """By the values of the labels, in the instrument's order; of a histogram how many."""
        return {
            labels: point.count if isinstance(point, HistogramDataPoint) else point.value
            for labels, point in self._points(instrument)
        }

    def sums(self, histogram: Instrument) -> ByLabels:
        """The sums of all values of a histogram."""
        return {labels: point.sum for labels, point in self._points(histogram)}

    def _points(self, instrument: Instrument) -> Iterator[tuple[tuple[str, ...], Any]]:
        for resource in self._measurements.data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == instrument.name:
                        for point in metric.data.data_points:
                            assert set(point.attributes or ()) == set(instrument.attributes)
                            labels = (point.attributes or {}).get
                            yield tuple(str(labels(name)) for name in instrument.attributes), point
