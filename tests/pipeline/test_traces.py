"""Traces and log lines of a running pipeline."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from nano_inference.bus.public import Completion
from nano_inference.config import STAGES, TelemetryConfig, load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import names, setup_logging, setup_tracing

from .builders import LONG, asking, end_of, until
from .conftest import LIMIT_S

# --- traces ----------------------------------------------------------------------------------


class Recorded:
    """A pipeline, and its spans once it has ended."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.spans: list[ReadableSpan] = []

    def of(self, completion: Completion) -> dict[str, list[ReadableSpan]]:
        """The spans of a request's trace, by name."""
        found: dict[str, list[ReadableSpan]] = defaultdict(list)
        for span in self.spans:
            if format(span.context.trace_id, "032x") == completion.trace_id:
                found[span.name].append(span)
        return found


@asynccontextmanager
async def recorded(
    telemetry: TelemetryConfig | None = None, **settings: object
) -> AsyncIterator[Recorded]:
    exporter = InMemorySpanExporter()
    tracing = setup_tracing(telemetry or TelemetryConfig(), "here", exporter)
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config(env={}, overrides={"engine.dtype": "float32", **overrides})
    async with asyncio.timeout(LIMIT_S):
        async with Pipeline(config, tracing=tracing) as pipeline:
            found = Recorded(pipeline)
            yield found
        tracing.shutdown()
        found.spans = list(exporter.get_finished_spans())


def events(spans: list[ReadableSpan]) -> list[str]:
    return [event.name for span in spans for event in span.events]


async def settled(record: Recorded) -> None:
    """The last spans of a request are made after its terminal message: the next one's wait for
    them."""
    await record.pipeline.complete({"prompt": "1", "sampling": {"max_tokens": 2}})


async def test_a_trace_says_whether_the_response_was_cached() -> None:
    settings = {"engine__deterministic": True, "engine__response_cache_bytes": 1 << 20}
    async with recorded(**settings) as record:
        first = await record.pipeline.complete(asking("1 + 1 ="))
        await until(lambda: record.pipeline._actors["admission"].load()["responses"] == 1)
        second = await record.pipeline.complete(asking("1 + 1 ="))
        await settled(record)
    computed, served = record.of(first), record.of(second)
    assert sorted(served) == ["admission", "streaming", "text_completion tiny"]
    for spans, result in ((computed, "miss"), (served, "hit")):
        assert spans["streaming"][0].attributes[names.RESPONSE_RESULT] == result


async def test_a_trace_has_every_stage_and_the_parts_of_the_executor() -> None:
    async with recorded() as record:
        done = await record.pipeline.complete(asking("1 + 1 ="))
        await settled(record)
    spans = record.of(done)
    assert sorted(spans) == sorted(["text_completion tiny", *STAGES, "prefill", "decode"])
    (executor,), (prefill,), (decode,) = (spans[n] for n in ("executor", "prefill", "decode"))
    assert prefill.parent.span_id == decode.parent.span_id == executor.context.span_id
    assert executor.start_time == prefill.start_time < prefill.end_time == decode.start_time
    assert decode.start_time < decode.end_time <= executor.end_time
    assert events(spans["streaming"]) == events(spans["executor"]) == [names.FIRST_TOKEN]
    (whole,) = spans["text_completion tiny"]
    assert (whole.kind, whole.attributes[names.OUTPUT_TOKENS]) == (SpanKind.CLIENT, 8)
    assert all(whole.start_time <= each.start_time for (each,) in spans.values())
    assert executor.attributes[names.SLICE_TOKENS] == 8


async def test_a_handover_shows_as_two_stays_and_the_way_between_them() -> None:
    roles = {"pipeline__replicas": 2, "pipeline__roles": ["prefill", "decode"]}
    async with recorded(**roles) as found:
        completion = await found.pipeline.complete(asking("12 + 30 = " * 8))
    spans = found.of(completion)
    giver, taker = sorted(spans["executor"], key=lambda span: span.start_time or 0)
    (handover,) = spans["batching.handover"]
    times = [giver.start_time, handover.start_time, handover.end_time, taker.start_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert (handover.attributes or {})[names.HANDED_OVER_BY] == "executor"
    for fetch in spans["batching.kv_fetch"]:  # if the blocks came after the token
        assert (fetch.attributes or {})[names.KV_BLOCKS_LOADED] > 0  # type: ignore[operator]
    replicas = [(span.attributes or {})["nano.replica"] for span in (giver, taker)]
    assert replicas == ["0", "1"]
    assert len(spans["batching"]) == 2


async def test_a_cancellation_shows_in_the_trace() -> None:
    async with recorded() as record:
        outputs = record.pipeline.submit({**LONG, "request_id": "r"})
        await anext(outputs)
        await record.pipeline.client.cancel("r")
        last = await end_of(outputs)
        await settled(record)
    assert isinstance(last, Completion)
    spans = record.of(last)
    assert names.CANCELLED in events(spans["streaming"])
    assert names.CANCELLED in events(spans["cancel"])
    for span in (*spans["streaming"], *spans["cancel"]):
        assert not span.status.is_ok
        assert span.attributes[names.ERROR_TYPE] == "cancelled"


async def test_steps_are_linked_to_the_requests_in_them() -> None:
    async with recorded(TelemetryConfig(), telemetry__steps_per_s=1e6) as record:
        done = await record.pipeline.complete(asking("1 + 1 =", n=2))
        await settled(record)
    steps = [
        span
        for span in record.spans
        if span.name == "step"
        and [format(link.context.trace_id, "032x") for link in span.links] == [done.trace_id]
    ]
    assert len(steps) >= 8
    assert {span.parent for span in steps} == {None}
    assert sum(span.attributes[names.PREFILL_TOKENS] for span in steps) <= done.usage.prompt_tokens
    assert max(span.attributes[names.BATCH_SIZE] for span in steps) == 2
    assert all(span.attributes[names.DEVICE_TIME_S] > 0 for span in steps)
    assert all(span.attributes[names.BLOCKS_FREE] > 0 for span in steps)


GIVEN = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize(
    ("traceparent", "followed"),
    [(GIVEN, True), ("nonsense", False), (GIVEN.replace("a", "0"), False)],
)
async def test_only_a_valid_trace_context_is_followed(traceparent: str, followed: bool) -> None:
    async with recorded() as record:
        client, request = record.pipeline.client, {"prompt": "1", "sampling": {"max_tokens": 2}}
        entry_id = await client.bus.requests.publish(request, traceparent=traceparent)
        results = client.bus.results.follow(entry_id, entry_id)
        done = await end_of(results)
        await settled(record)
    assert isinstance(done, Completion)
    assert (done.trace_id == "a" * 32) is followed
    spans = record.of(done)
    assert set(STAGES) < set(spans), "one trace, from admission on"
    assert (spans["admission"][0].parent is not None) is followed


# --- logs ------------------------------------------------------------------------------------


SECRET = "xylophone"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    configured, before = structlog.get_config(), (root.handlers[:], root.level)
    yield
    structlog.configure(**configured)
    root.handlers[:], root.level = before


async def lines_of(
    capsys: pytest.CaptureFixture[str], requests: list[dict[str, object]], **settings: object
) -> tuple[list[Completion], list[dict[str, object]]]:
    """The answers to requests, and all that was logged meanwhile."""
    telemetry = {"telemetry.log_level": "debug", "telemetry.log_format": "json"}
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config(env={}, overrides={**telemetry, **overrides})
    capsys.readouterr()
    setup_logging(config.telemetry)
    tracing = setup_tracing(TelemetryConfig(), "here", InMemorySpanExporter())
    async with asyncio.timeout(LIMIT_S), Pipeline(config, tracing=tracing) as pipeline:
        answers = [await pipeline.complete(request) for request in requests]
    tracing.shutdown()
    return answers, [json.loads(line) for line in capsys.readouterr().err.splitlines()]


# One that is answered, and some that are refused for different reasons.
REQUESTS: list[dict[str, object]] = [
    {"prompt": f"{SECRET} 1 + 1 =", "sampling": {"max_tokens": 4}},
    {"messages": [{"role": "user", "content": SECRET}], "sampling": {"max_tokens": 4}},
    {"prompt": SECRET, "sampling": {"max_tokens": 0}},
    {"prompt": SECRET * 5000},
    {"prompt": SECRET, "sampling": {"stop": [""]}},
    {"prompt": SECRET, "model": "another"},
    {"prompt": SECRET, "n": 10_000},
]


async def test_no_line_has_text_of_a_request_at_any_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers, lines = await lines_of(capsys, REQUESTS)
    assert {answer.status for answer in answers} == {"done", "error"}
    assert len([line for line in lines if line["event"] == "request_refused"]) >= 4
    assert [line for line in lines if SECRET in json.dumps(line)] == []


async def test_prompts_are_logged_if_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = await lines_of(capsys, REQUESTS[:2], telemetry__log_prompts=True)
    found = [line for line in lines if SECRET in json.dumps(line)]
    assert [line["event"] for line in found] == ["request_admitted"] * 2


async def test_log_lines_carry_request_and_trace_ids(capsys: pytest.CaptureFixture[str]) -> None:
    requests = [{**REQUESTS[0], "request_id": "r-1"}, {"request_id": "r-2", "prompt": ""}]
    answers, lines = await lines_of(capsys, requests, telemetry__log_prompts=True)
    (admitted,) = [line for line in lines if line["event"] == "request_admitted"]
    (refused,) = [line for line in lines if line["event"] == "request_refused"]
    assert (admitted["request_id"], admitted["trace_id"]) == ("r-1", answers[0].trace_id)
    assert (refused["request_id"], refused["stage"]) == ("r-2", "admission")
    for line in (admitted, refused):
        assert len(str(line["trace_id"])) == 32
        assert len(str(line["span_id"])) == 16


async def test_pipeline_in_a_program_prints_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    structlog.reset_defaults()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    async with Pipeline() as pipeline:
        await pipeline.complete({"prompt": "98 + 25 =", "sampling": {"max_tokens": 1}})
        await pipeline.drain()
    assert capfd.readouterr() == ("", "")
