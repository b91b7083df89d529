"""Commands about this machine: its models, and the servers that run on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nano_inference.cli import local
from nano_inference.cli.running import Running, registered
from nano_inference.store.process_state import identity_of

from .conftest import Run, assert_refused


@contextmanager
def program(**fields: object) -> Iterator[tuple[subprocess.Popen[bytes], Running]]:
    """A program that is registered as a server."""
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        about = {"command": "serve", "pid": sleeping.pid, "process": identity_of(sleeping.pid)}
        running = Running(**about | fields)  # type: ignore[arg-type]
        with registered(running):
            yield sleeping, running
        sleeping.kill()


def test_list_has_the_bundled_models_with_their_sizes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pulled = tmp_path / ".cache/nano-inference/models/org--name"
    pulled.mkdir(parents=True)
    (pulled / "model.safetensors").write_bytes(b"0" * 2_000_000)
    rows = [line.split() for line in run("list").stdout.splitlines()]
    assert rows[0] == ["NAME", "SIZE", "MODIFIED"]
    assert rows[1] == ["org/name", "2.0", "MB", "just", "now"]
    assert [row[0] for row in rows[2:]] == ["tiny", "tiny-vision"]
    assert json.loads(run("list", "--json").stdout.splitlines()[0])["size"] == 2_000_000


def test_ps_has_a_row_for_each_model_that_runs(run: Run, url: str, closed_port: int) -> None:
    assert run("ps").stdout.startswith("nothing runs")
    away = f"http://127.0.0.1:{closed_port}"
    with (
        registered(Running(command="gateway", url=url, models=("tiny",), started_at=2)),
        program(url=away, models=("gone",), started_at=1),
    ):
        _, tiny, gone = run("ps").stdout.splitlines()
    assert tiny.split()[0] == "tiny"
    assert "100% CPU" in tiny
    assert "Forever" in tiny
    assert url in tiny
    assert gone.split()[:5] == ["gone", "-", "-", "-", "unknown"]


def test_stop_ends_what_it_names(run: Run) -> None:
    assert_refused(run("stop"), "nothing runs on this machine")
    with (
        program(url="http://127.0.0.1:1", models=("a",)) as (first, _),
        program(url="http://127.0.0.1:2", models=("b",)) as (second, _),
    ):
        assert_refused(run("stop"), "2 run", "http://127.0.0.1:1", "or give --all")
        assert_refused(run("stop", "c"), "nothing that runs is called 'c'")
        assert run("stop", "b").stdout == "http://127.0.0.1:2 is stopped\n"
        assert second.wait() == -15
        assert first.poll() is None
        assert run("stop", "1").status == 0  # its port


def test_logs_are_those_of_what_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("one\n\x1b[31mtwo\x1b[0m\nthree\n")
    with program(log=str(log)) as (_, running):
        assert run("logs", "-n", "2", "--no-follow").stdout == "two\nthree\n"
        assert run("logs", "-n", "2").stdout == "two\nthree\n", "ends without a terminal"
        monkeypatch.setattr(local, "is_alive", lambda each: False)  # it has just ended
        assert run("logs", "--follow").stdout == "one\ntwo\nthree\n"
        monkeypatch.setattr(local, "is_alive", lambda each: True)
        monkeypatch.setattr(local, "_left_within", lambda seconds: True)
        assert run("logs", "-f", "-n", "1").stdout == "three\n"
        with registered(replace(running, log=None, started_at=running.started_at + 1)):
            assert_refused_last(run("logs"), "goes to a pipe")


def test_a_reader_that_has_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert not local._left_within(0)
        os.close(reading)
        assert local._left_within(0)


def assert_refused_last(ran: object, words: str) -> None:
    """Check the last line: before it is the choice of the newest."""
    assert words in ran.stderr.splitlines()[-1]  # type: ignore[attr-defined]
    assert ran.status == 2  # type: ignore[attr-defined]


def test_a_log_on_a_terminal_is_kept_within_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nano_inference.cli import running as register
    from nano_inference.telemetry import LogOutput

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(register, "MOST_LOG_BYTES", 100)
    with registered(Running(command="serve")):
        (running,) = register.found()
        assert running.log is not None
        assert LogOutput.copy is not None
        for number in range(50):
            LogOutput.copy(f"line {number}\n")
        kept = Path(running.log).read_text()
        assert len(kept) <= 110
        assert kept.endswith("line 49\n")
    assert not Path(running.log).exists()
    assert LogOutput.copy is None
