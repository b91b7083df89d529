"""The cost of traces, in counts that are the same on every machine.

Bytecode instructions of our files that make spans and of OpenTelemetry's, in the thread of the
event loop; encoding, which has a thread of its own, is counted by itself. A request of 64 tokens on
a full batch takes some eighteen thousand in all. Who makes spans cheaper lowers the bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.config import TelemetryConfig, load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import TraceContext, Tracing, names, setup_tracing
from nano_inference.telemetry.span_messages import span_message
from nano_inference.telemetry.spans import FinishedSpan, finished

from ..instructions import counted, instructions
from ..measured import Kept

LIBRARY = "opentelemetry"
PARENT = TraceContext("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
ATTRIBUTES = {names.STAGE: "x", names.REQUEST_ID: "r", names.EPOCH: 1, names.OUTPUT_TOKENS: 3}

MAKING_A_SPAN, ENCODING_A_SPAN = 155, 1_200
NOT_RECORDED = 40
PER_REQUEST, PER_STEP = 2_600, 180
PER_REQUEST_NOT_RECORDED, PER_STEP_NOT_RECORDED = 600, 150


def spans(number: int) -> list[FinishedSpan]:
    kept = Kept()
    tracing = Tracing(TracerProvider(), [SimpleSpanProcessor(kept)])
    for _ in range(number):
        tracing.span("queue", PARENT, 1, 2, ATTRIBUTES, events=(("first", 1),))
    return [*finished(kept.spans)]


def test_making_a_span() -> None:
    tracing = setup_tracing(TelemetryConfig(), "here", InMemorySpanExporter())
    make = lambda: tracing.span("queue", PARENT, 1, 2, ATTRIBUTES)  # noqa: E731
    make()
    assert 50 < instructions(make, LIBRARY).total() < MAKING_A_SPAN
    parent = TraceContext(PARENT.traceparent[:-1] + "0")
    refuse = lambda: tracing.span("queue", parent, 1, 2, ATTRIBUTES)  # noqa: E731
    assert 5 < instructions(refuse, LIBRARY).total() < NOT_RECORDED
    tracing.shutdown()


def test_encoding_a_span() -> None:
    made = spans(100)
    encode = lambda: [*map(span_message, made)]  # noqa: E731
    encode()
    assert 50 < instructions(encode, LIBRARY).total() / 100 < ENCODING_A_SPAN


async def run(pipeline: Pipeline, requests: int, tokens: int) -> int:
    """Instructions for spans of so many requests at once."""
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    with counted(LIBRARY) as counts:
        done = await asyncio.gather(
            *(
                pipeline.complete({"prompt": f"{number} and", "sampling": sampling})
                for number in range(requests)
            )
        )
    assert {completion.status for completion in done} == {"done"}
    return for_spans(counts)


def for_spans(counts: Counter[str]) -> int:
    return sum(
        number
        for name, number in counts.items()
        if name.startswith("/telemetry/") or name.endswith("/spans.py") or LIBRARY in name
    )


@pytest.mark.parametrize(
    ("ratio", "per_request", "per_step"),
    [(1.0, PER_REQUEST, PER_STEP), (0.0, PER_REQUEST_NOT_RECORDED, PER_STEP_NOT_RECORDED)],
)
async def test_a_request_and_a_step(ratio: float, per_request: int, per_step: int) -> None:
    """A step costs the same however many rows it has: no Python runs for each of them."""
    telemetry = TelemetryConfig(trace_ratio=ratio)
    tracing = setup_tracing(telemetry, "here", InMemorySpanExporter())
    config = load_config(env={}, overrides={"engine.dtype": "float32", "telemetry.steps_per_s": 0})
    async with Pipeline(config, tracing=tracing) as pipeline:
        await run(pipeline, 2, 4)
        few, many = await run(pipeline, 2, 8), await run(pipeline, 18, 8)
        long = await run(pipeline, 18, 40)
    tracing.shutdown()
    assert 100 < (many - few) / 16 < per_request
    assert 10 < (long - many) / 32 < per_step
