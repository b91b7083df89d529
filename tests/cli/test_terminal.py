"""Progress that commands show while they wait."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import anyio
import pytest
from rich.console import Console

from nano_inference.cli import terminal
from nano_inference.cli.processes import Printer, without_controls
from nano_inference.store.board import StageReport
from nano_inference.telemetry import LogOutput


class Screen(io.StringIO):
    """Output of which a text is awaited."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.shown = text, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.text in self.getvalue():
            self.shown.set()
        return written


def report(stage: str, state: Any, load: dict[str, Any]) -> StageReport:
    about = {"lane": "0", "incarnation": "1", "host": "h", "pid": 1, "epoch": 0}
    return StageReport(stage=stage, state=state, load=load, **about)


def test_slow_commands_show_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.001)
    screen, pipe = Screen("loading code"), Screen("loading code")
    with terminal.waiting("loading code", Console(file=screen, force_terminal=True)):
        assert screen.shown.wait(60)
    with terminal.waiting("loading code", Console(file=pipe, force_terminal=False)):
        pass
    assert pipe.getvalue() == ""
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.001)
    with terminal.waiting("loading code", Console(file=pipe, force_terminal=False)):
        assert pipe.shown.wait(60)
    assert pipe.getvalue().startswith("nano-inference: loading code, 0 s\n")
    monkeypatch.setattr(terminal, "PATIENCE_S", 60.0)
    quick = Screen("loading code")
    with terminal.waiting("loading code", Console(file=quick, force_terminal=True)):
        pass
    assert quick.getvalue() == ""


async def test_a_model_that_loads_has_a_bar_until_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log lines are above it."""
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal, "_LOOK_EVERY_S", 0.0)
    log: Any = LogOutput(io.StringIO(), lambda lines: "")
    monkeypatch.setattr(log, "isatty", lambda: True)
    states = [("starting", {}), ("starting", {"loaded": 0.5}), ("waiting", {})]
    screen: Any = Console(file=io.StringIO(), force_terminal=True, width=80)

    async def read() -> list[StageReport]:
        log.write("loaded\n")
        if not states:
            return []
        state, load = states.pop(0)
        return [report("executor", state, load), report("executor.1", "ready", {})]

    await terminal.show_loading(read, 2, screen)
    assert "loading executor.1" in screen.file.getvalue()
    assert log._stream.getvalue() == "\r\x1b[Kloaded\n" * 3
    log.write("ready\n")
    assert log._stream.getvalue().endswith("\nready\n"), "the bar has gone"


async def test_a_kept_log_has_lines_and_no_frames_of_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal, "_LOOK_EVERY_S", 0.0)
    kept: list[str] = []
    monkeypatch.setattr(LogOutput, "copy", kept.append)
    screen = Screen("loading executor")
    monkeypatch.setattr(screen, "isatty", lambda: True)
    printer = Printer(stream=screen)
    states = ["starting", "starting", "ready"]

    async def read() -> list[StageReport]:
        printer.line("", "executor", f"line {len(states)}")
        return [report("executor", states.pop(0), {}), report("executor.1", "ready", {})]

    await terminal.show_loading(read, 2, printer._console)
    assert "loading executor" in screen.getvalue()
    lines = [without_controls(line).split() for line in "".join(kept).splitlines()]
    assert lines == [["executor", "line", str(number)] for number in (3, 2, 1)]


async def test_the_bar_of_a_replica_that_is_given_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal, "_LOOK_EVERY_S", 0.0)
    screen: Any = Console(file=io.StringIO(), force_terminal=True, width=80)
    reports = [[report("executor", "ready", {}), report("executor.1", "starting", {})]]
    given_up: list[str] = []

    async def read() -> list[StageReport]:
        if not reports:
            given_up.append("executor.1")  # its process has ended for good, and reports nothing
        return reports.pop() if reports else []

    with anyio.fail_after(60):
        await terminal.show_loading(read, 2, screen, lambda: given_up)
    assert "loading executor.1" in screen.file.getvalue()


def test_a_value_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = ["a\u2028b\u2029c\x85d", {"n": 1}]
    terminal.print_json(*values)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == values
