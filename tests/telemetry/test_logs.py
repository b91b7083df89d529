"""One renderer for our logs and those of libraries; JSON lines when it is not a terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from nano_inference.config import TelemetryConfig
from nano_inference.telemetry import now_ns, setup_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == "", "logs never mix with answers"
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_lines_with_what_was_bound(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig())
    structlog.get_logger().bind(stage="admission").info("refused", request_id="r1")
    (line,) = lines(capsys)
    assert {k: line[k] for k in ("event", "level", "stage", "request_id")} == {
        "event": "refused",
        "level": "info",
        "stage": "admission",
        "request_id": "r1",
    }


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig(log_level="warning"))
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_libraries_go_through_the_same_renderer(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig())
    logging.getLogger("some.library").warning("it says %d", 3)
    logging.getLogger("some.library").info("chatter")
    assert [(line["event"], line["level"]) for line in lines(capsys)] == [("it says 3", "warning")]


def test_tracebacks_are_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig())
    error = ValueError("boom")
    structlog.get_logger().error("failed", exc_info=error)
    (line,) = lines(capsys)
    assert "ValueError: boom" in str(line["exception"])


def test_the_clock_never_goes_back() -> None:
    stamps = [now_ns() for _ in range(1000)]
    assert stamps == sorted(stamps)
