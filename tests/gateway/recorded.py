"""Recorded spans and metrics of a gateway."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.config import TelemetryConfig
from nano_inference.gateway.server.measures import Measures
from nano_inference.telemetry import setup_tracing
from nano_inference.telemetry.instruments import GATEWAY_REFUSED, Instrument

from ..measured import ByLabels, Measured


class Recorded:
    """Measures, with all that was recorded."""

    def __init__(self, telemetry: TelemetryConfig | None = None) -> None:
        self._measured = Measured()
        self._exporter = InMemorySpanExporter()
        self._tracing = setup_tracing(telemetry or TelemetryConfig(), "here", self._exporter)
        self.measures = Measures(self._tracing, self._measured.metrics)

    def spans(self) -> list[ReadableSpan]:
        self._tracing.flush()
        return list(self._exporter.get_finished_spans())

    def values(self, instrument: Instrument) -> ByLabels:
        """The values of an instrument by labels, with current gauges."""
        self.measures.update_gauges()
        return self._measured.values(instrument)

    def refused(self) -> dict[str, float]:
        """The refused calls by reason, without zeros."""
        found = self.values(GATEWAY_REFUSED)
        return {reason: number for (reason,), number in found.items() if number}


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """The ids of a span's trace, of itself and of its parent ("" for none)."""
    parent = format(span.parent.span_id, "016x") if span.parent else ""
    return format(span.context.trace_id, "032x"), format(span.context.span_id, "016x"), parent
