"""Whose first span may be lost with a killed admission has it made again, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.bus import open_bus
from nano_inference.bus.messages import Completion, RequestInfo, StageTime, Timings
from nano_inference.config import (
    STAGES,
    BusConfig,
    Config,
    PipelineConfig,
    TelemetryConfig,
)
from nano_inference.stages.actor import StageContext
from nano_inference.stages.streaming.core import EndedRequest
from nano_inference.stages.streaming.spans import KEPT_NS, StreamingSpans
from nano_inference.stages.streaming.stage import StreamingStage
from nano_inference.telemetry import names, setup_tracing

CLIENTS = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Rig:
    """A streaming stage's spans, and what came of them."""

    def __init__(self, stages: tuple[str, ...]) -> None:
        bus = BusConfig(url="redis://127.0.0.1:1")
        config = Config(bus=bus, pipeline=PipelineConfig(stages=stages))
        self._exporter = InMemorySpanExporter()
        self.tracing = setup_tracing(TelemetryConfig(), "here", self._exporter)
        self.stage = StreamingStage(StageContext(config, open_bus(BusConfig()), self.tracing))
        self.spans = StreamingSpans(self.stage)

    def end(self, entry_id: str, traceparent: str = "", at_ns: int = 900) -> str:
        """A request ends. Returns its traceparent: as admission makes it, or the one given."""
        traceparent = traceparent or self.stage.first_context(entry_id).traceparent
        info = RequestInfo(f"r{entry_id}", entry_id, "m", 2, False, (), 5, traceparent, "", 100)
        held = (StageTime(stage="admission", start_ns=100, end_ns=300),)
        completion = Completion(
            request_id=info.request_id,
            entry_id=entry_id,
            model="m",
            status="done",
            timings=Timings(received_ns=100, finished_ns=at_ns, stages=held),
        )
        self.spans.ended(EndedRequest(info, completion))
        return traceparent

    def made(self) -> list[ReadableSpan]:
        """Spans of admission that have been made until now."""
        self.tracing.flush()
        return [span for span in self._exporter.get_finished_spans() if span.name == "admission"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(("streaming",))
    yield rig
    rig.tracing.shutdown()


def test_a_successor_of_admission_finds_the_first_span_made_again(rig: Rig) -> None:
    rig.spans.begun_by("admission-1")
    traceparent = rig.end("7-0")
    rig.spans.begun_by("admission-1")
    assert rig.made() == []
    rig.spans.begun_by("admission-2")
    (span,) = rig.made()
    assert span.context is not None
    assert span.parent is None
    assert format(span.context.trace_id, "032x") in traceparent
    assert format(span.context.span_id, "016x") in traceparent
    assert (span.start_time, span.end_time) == (100, 300)
    assert span.attributes is not None
    assert (span.attributes[names.MESSAGE_ID], span.attributes[names.SAMPLES]) == ("7-0", 2)
    rig.spans.begun_by("admission-3")
    assert len(rig.made()) == 1, "once is enough"


def test_where_the_client_has_made_the_first_span_none_is_made(rig: Rig) -> None:
    rig.spans.begun_by("admission-1")
    rig.end("7-0", CLIENTS)
    rig.end("8-0", CLIENTS[:-1] + "0")
    rig.spans.begun_by("admission-2")
    assert rig.made() == []


def test_what_ended_long_before_the_last_one_has_been_exported(rig: Rig) -> None:
    rig.spans.begun_by("admission-1")
    rig.end("7-0", at_ns=900)
    rig.end("8-0", at_ns=901 + KEPT_NS)
    rig.spans.begun_by("admission-2")
    (span,) = rig.made()
    assert span.attributes is not None
    assert span.attributes[names.MESSAGE_ID] == "8-0"


def test_in_one_process_nothing_is_lost_with_admission() -> None:
    rig = Rig(STAGES)
    rig.spans.begun_by("admission-1")
    rig.end("7-0")
    rig.spans.begun_by("admission-2")
    assert rig.made() == []
    rig.tracing.shutdown()
