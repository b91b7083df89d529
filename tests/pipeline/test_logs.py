"""Log lines of a running pipeline: whose they are, and what they never hold."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.bus.public import Completion
from nano_inference.config import TelemetryConfig, load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging, setup_tracing

SECRET = "xylophone"
LIMIT_S = 60


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


async def test_log_lines_carry_request_and_trace_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    async with asyncio.timeout(LIMIT_S), Pipeline() as pipeline:
        await pipeline.complete({"prompt": "98 + 25 =", "sampling": {"max_tokens": 1}})
        await pipeline.drain()
    assert capfd.readouterr() == ("", "")
