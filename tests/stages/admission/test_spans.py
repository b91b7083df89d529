"""A successor repeats first spans that a killed admission may have lost, and no others."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.bus import open_bus
from nano_inference.bus.entries import entry_key
from nano_inference.bus.public import Completion, CompletionSample, StageTime, Timings, Usage
from nano_inference.config import BusConfig, BusError, Config, TelemetryConfig
from nano_inference.stages.actor import StageContext
from nano_inference.stages.admission.measures import trace_first_again
from nano_inference.stages.admission.stage import AdmissionStage
from nano_inference.telemetry import names, setup_tracing

SAMPLE = CompletionSample(sample_index=0, text="", token_ids=(), logprobs=(), finish_reason="stop")


class Rig:
    """An admission that comes after another, and what spans it makes."""

    def __init__(self, url: str) -> None:
        bus = BusConfig(url=url, prefix=f"test-{uuid.uuid4().hex[:8]}")
        self._exporter = InMemorySpanExporter()
        self.tracing = setup_tracing(TelemetryConfig(), "here", self._exporter)
        self.bus = open_bus(bus)
        self.stage = AdmissionStage(StageContext(Config(bus=bus), self.bus, self.tracing))

    async def end(self, entry_id: str, trace_id: str = "", refused: bool = False) -> str:
        """A request ended. Returns its trace's id: as admission makes it, or the one given."""
        trace_id = (
            trace_id or self.stage.first_context(entry_key(entry_id, f"r{entry_id}")).trace_id
        )
        held = StageTime(stage="admission", start_ns=100, end_ns=300)
        done = Completion(
            request_id=f"r{entry_id}",
            entry_id=entry_id,
            model="m",
            status="error" if refused else "done",
            samples=(SAMPLE, SAMPLE),
            usage=Usage(prompt_tokens=5),
            timings=Timings(received_ns=100, finished_ns=900, stages=() if refused else (held,)),
            trace_id=trace_id,
        )
        await self.bus.results.deliver([(done.request_id, [done])])
        return trace_id

    async def made(self) -> list[ReadableSpan]:
        await trace_first_again(self.stage)
        self.tracing.flush()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.tracing.shutdown()
    await rig.bus.aclose()


async def test_the_first_span_is_repeated(rig: Rig) -> None:
    trace_id = await rig.end("7-0")
    (span,) = await rig.made()
    assert span.name == "admission"
    assert span.context is not None
    assert span.parent is None
    assert format(span.context.trace_id, "032x") == trace_id
    assert format(span.context.span_id, "016x") == rig.stage.first_context("7-0 r7-0").span_id
    assert (span.start_time, span.end_time) == (100, 300)
    assert span.attributes is not None
    assert span.attributes[names.MESSAGE_ID] == "7-0"
    assert span.attributes[names.REQUEST_ID] == "r7-0"
    assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.SAMPLES]) == (5, 2)


async def test_a_clients_first_span_is_not_repeated(rig: Rig) -> None:
    await rig.end("7-0", trace_id="a" * 32)
    assert await rig.made() == []


async def test_a_refused_request_has_no_repeated_span(rig: Rig) -> None:
    await rig.end("7-0", refused=True)
    assert await rig.made() == []


async def test_no_span_is_repeated_without_ended_requests(rig: Rig) -> None:
    assert await rig.made() == []


async def test_an_unreachable_bus_does_not_end_admission(rig: Rig) -> None:
    await rig.bus.aclose()
    with pytest.raises(BusError):
        [_ async for _ in rig.bus.results.newest(1)]
    assert await rig.made() == []
