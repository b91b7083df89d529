"""What commands show while they wait."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from nano_inference.cli import terminal


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


def test_what_takes_long_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.001)
    screen, pipe = Screen("loading code"), Screen("loading code")
    with terminal.waiting("loading code", Console(file=screen, force_terminal=True)):
        assert screen.shown.wait(60)
    with terminal.waiting("loading code", Console(file=pipe, force_terminal=False)):
        pass
    assert pipe.getvalue() == ""
    monkeypatch.setattr(terminal, "_PATIENCE_S", 60.0)
    quick = Screen("loading code")
    with terminal.waiting("loading code", Console(file=quick, force_terminal=True)):
        pass
    assert quick.getvalue() == ""
