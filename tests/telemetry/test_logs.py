"""One renderer for our logs and those of libraries; JSON lines when it is not a terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from nano_inference.config import TelemetryConfig
from nano_inference.config.logger import get_logger
from nano_inference.telemetry import LogOutput, logs, now_ns, setup_logging
from nano_inference.telemetry.log_output import SUPPRESSED, UNWRITABLE, dropped_lines
from nano_inference.telemetry.logs import MOST_LINES, WINDOW_S, LogLimit


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


def test_json_lines_have_bound_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig())
    structlog.get_logger().bind(stage="admission").info("refused", request_id="r1")
    (line,) = lines(capsys)
    fields = {"event": "refused", "level": "info", "stage": "admission", "request_id": "r1"}
    assert fields.items() <= line.items()


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig(log_level="warning"))
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_text_is_brief_and_json_has_fields(capsys: pytest.CaptureFixture[str]) -> None:
    def logged(**settings: Any) -> str:
        setup_logging(TelemetryConfig(**settings), said=("listens",))
        log = structlog.get_logger()
        log.info("listens", url="http://h")
        log.info("loaded", brief="loaded tiny in 0.6 s", seconds=0.6)
        log.warning("unverified", device="cpu")
        return capsys.readouterr().err

    loaded, warned = logged(log_format="text").splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d loaded tiny in 0.6 s", loaded)
    assert "[warning  ] unverified" in warned
    assert "device=cpu" in warned
    detailed = logged(log_format="text", log_level="debug")
    assert "seconds=0.6" in detailed
    assert "url=http://h" in detailed
    assert "tiny" not in detailed
    objects = [json.loads(line) for line in logged(log_format="json").splitlines()]
    assert [each["event"] for each in objects] == ["listens", "loaded", "unverified"]
    assert objects[1]["seconds"] == 0.6
    assert "brief" not in objects[1]


def test_without_setup_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    structlog.reset_defaults()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    get_logger().warning("lost", seconds=1)
    assert capsys.readouterr() == ("", "")


def test_program_with_logging_reads_lines_with_their_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    structlog.reset_defaults()
    with caplog.at_level(logging.INFO):
        log = get_logger().bind(stage="executor")
        log.debug("model_loading")
        log.info("model_loaded", brief="loaded", seconds=1)
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
    first, second = caplog.messages
    assert first == "model_loaded stage='executor' seconds=1"
    assert second.startswith("failed stage='executor'\nTraceback")
    assert "why" in second
    assert {record.name for record in caplog.records} == {"nano_inference"}


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


@contextmanager
def output_to(file: int) -> Iterator[LogOutput]:
    with open(file, "w") as stream:
        yield LogOutput(stream, lambda lines: f"{lines} dropped\n")


def test_a_full_disk_only_drops_lines() -> None:
    before = dropped_lines[UNWRITABLE]
    with open("/dev/full", "w") as stream:
        output = LogOutput(stream, str)
        for _ in range(3):
            output.write("a line\n")
    output.write("behind its end\n")
    assert dropped_lines[UNWRITABLE] == before + 4


def test_a_closed_pipe_only_drops_lines() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    before = dropped_lines[UNWRITABLE]
    with output_to(writing) as output:
        output.write("a line\n")
    assert dropped_lines[UNWRITABLE] == before + 1


def test_a_full_pipe_drops_lines_and_reports_their_number() -> None:
    reading, writing = os.pipe()
    with output_to(writing) as output:
        lines = 0
        while not output._dropped:
            output.write(f"{lines}{'x' * 1000}\n")
            lines += 1
        output.write("one more\n")
        had = os.read(reading, 1 << 20)
        output.write("the next\n")
        had += os.read(reading, 1 << 20)
    os.close(reading)
    *whole, torn, told, last = had.decode().splitlines()
    assert whole[-1].startswith(str(len(whole) - 1))
    assert (told, last) == ("2 dropped", "the next")
    assert torn == whole[-1] or torn.startswith(str(len(whole)))


def test_lines_after_a_torn_line_are_whole() -> None:
    reading, writing = os.pipe()
    with output_to(writing) as output:
        output.write("x" * (1 << 20) + "\n")
        os.read(reading, 1 << 20)
        output.write("the next\n")
        had = os.read(reading, 1 << 20)
    os.close(reading)
    assert had.decode() == "\n1 dropped\nthe next\n"


def test_the_first_line_after_an_outage_has_the_number_of_dropped_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(TelemetryConfig())
        structlog.get_logger().error("lost")
        logging.getLogger("some.library").error("lost too")
        with (tmp_path / "log").open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
        structlog.get_logger().info("back")
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["event"], line.get("dropped_lines")) for line in told] == [
        ("log_written_again", 2),
        ("back", None),
    ]


def test_repeated_lines_are_suppressed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(logs, "LogLimit", lambda *given: LogLimit(*given, lambda: now_s))
    setup_logging(TelemetryConfig())
    before = dropped_lines[SUPPRESSED]
    log = structlog.get_logger()
    for number in range(100):
        log.info("request_refused", reason=f"regex {number}")
        log.error("http_handler_failed", exc_info=ValueError(str(number)))
        logging.getLogger("asyncio").error(f"Exception in callback {number}")
    assert len(lines(capsys)) == 3 * MOST_LINES
    assert dropped_lines[SUPPRESSED] == before + 3 * (100 - MOST_LINES)
    now_s = WINDOW_S
    log.info("something_else")
    *told, last = lines(capsys)
    assert {(str(line["of"]).partition(":")[0], line["lines"]) for line in told} == {
        (name, 100 - MOST_LINES) for name in ("request_refused", "http_handler_failed", "asyncio")
    }
    assert {line["event"] for line in told} == {"log_lines_suppressed"}
    assert last["event"] == "something_else"


def test_lines_that_a_setting_enables_are_not_limited(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig(log_level="debug"))
    for _ in range(2 * MOST_LINES):
        structlog.get_logger().info("http_call")
        structlog.get_logger().debug("stale_message_dropped")
    assert len(lines(capsys)) == 4 * MOST_LINES
