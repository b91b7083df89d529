"""Whatever a child of `up` prints, `up` goes on; and no line of a log is long."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from nano_inference.bus import Malformed, MemoryBus
from nano_inference.bus.codec import check_request, decode_request
from nano_inference.bus.control import StageStopped
from nano_inference.bus.envelope import Envelope
from nano_inference.cli.children import Child, Forked, Forks, spawn
from nano_inference.cli.processes import MOST_LINE_BYTES, Lines, without_controls
from nano_inference.cli.up import _child_environment
from nano_inference.config import MOST_TEXT, Config, PipelineConfig, TelemetryConfig, load_config
from nano_inference.pipeline.supervisor import StageFailed, supervise
from nano_inference.stages.actor import Actor, StageContext
from nano_inference.telemetry import Tracing, setup_logging
from nano_inference.telemetry.logs import MOST_LOG_BYTES

from ..processes import processes_of
from ..soaking import in_soak

LIMIT_S = 60
ON_LINUX = sys.platform == "linux"

LONG = 1_200_000
"""Characters: more than `up` could once read as one line."""

HOSTILE = r"""
import os
def say(data):
    while data:
        data = data[os.write(1, data):]
say(b"first\n")
say(b"x" * 3_000_000 + b"\n")
say(b"\xff\xfe\xed\xa0\x80 no UTF-8\n")
say(b"\x1b[" + "\u00b2".encode() + b"m a colour that is no number\n")
say(b"\x1b[" + b"1" * 5000 + b"m a colour of 5000 digits\n")
say(b"\x1b]" * 30_000 + b"\n")
say(bytes(range(32)) + b"\n")
say(b"[bold]no markup[/]\n")
say(b"last, without an end")
"""


class Talking(Forks):
    """Children that run a program of ours."""

    def __init__(self, program: str) -> None:
        super().__init__((), "spawn", None, print)
        self._program = program

    async def start(self, role: str, arguments: Sequence[str]) -> Child:
        return await spawn([sys.executable, "-I", "-c", self._program], None)


async def talk(program: str, file: io.StringIO) -> int:
    """Return the exit status; the shown output goes into the file."""
    config = load_config(env={})
    return await processes_of(config, stream=file, forks=Talking(program))._run_once("executor")


async def test_nothing_that_a_child_prints_ends_up() -> None:
    shown = io.StringIO()
    assert await talk(HOSTILE, shown) == 0
    lines = shown.getvalue().splitlines()
    assert lines[0].endswith("first")
    assert f"({3_000_000 - MOST_LINE_BYTES} more bytes left out)" in lines[1]
    assert [line for line in lines if "no UTF-8" in line]
    assert [line for line in lines if line.endswith("a colour that is no number")]
    assert [line for line in lines if line.endswith("a colour of 5000 digits")]
    assert [line for line in lines if "[bold]no markup[/]" in line]
    assert lines[-1].endswith("last, without an end")
    assert max(map(len, lines)) < MOST_LINE_BYTES + 200
    assert all(char.isprintable() or char == "\n" for char in shown.getvalue())


async def test_a_console_that_takes_nothing_does_not_end_up() -> None:
    """Its file is on a disk that is full, say."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    assert await talk("print('a line')", Full()) == 0


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_lines_are_the_same_however_they_arrive(chunks: list[bytes], most: int) -> None:
    lines = Lines(most)
    found = [line for chunk in chunks for line in lines.feed(chunk)] + list(lines.end())
    whole = b"".join(chunks)
    wanted = whole.split(b"\n")
    if not wanted[-1]:
        wanted.pop()
    left_out = [
        f"... ({len(line) - most} more bytes left out)" * (len(line) > most) for line in wanted
    ]
    texts = [without_controls(line[:most].decode(errors="replace")) for line in wanted]
    assert found == [text + more for text, more in zip(texts, left_out, strict=True)]


@settings(deadline=None)
@given(st.text())
def test_shown_text_has_no_terminal_control_sequences(text: str) -> None:
    assert not set(without_controls(text)) & {
        chr(code) for code in (*range(9), *range(11, 32), 127)
    }
    assert without_controls("plain \tüλ") == "plain \tüλ"


# --- what a child imports ---------------------------------------------------------------------

PLANTED = ("anyio", "msgspec", "redis", "rich", "structlog", "torch", "typer", "yaml", "json")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A working folder with modules that have the names of others."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was planted')")
    (tmp_path / "nano_inference").mkdir()
    (tmp_path / "nano_inference" / "__main__.py").write_text("raise SystemExit('we were planted')")
    return tmp_path


# What a fork server imports is that of its role; a program imports the same for each.
@pytest.mark.parametrize(
    ("method", "role"),
    [
        in_soak("forkserver", "executor.1"),
        ("forkserver", "gateway"),
        in_soak("spawn", "admission"),
        ("spawn", "gateway"),
    ],
)
async def test_a_child_imports_nothing_from_the_working_folder(
    planted: Path, role: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `export PYTHONPATH=$PYTHONPATH:/somewhere` makes it: the empty part is the working folder.
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{planted / 'none'}")
    monkeypatch.chdir(planted)
    settings = {"pipeline.replicas": 2, "gateway.port": 1, "pipeline.start_method": method}
    environment = _child_environment(load_config(env={}, overrides=settings), {})
    assert environment["PYTHONPATH"] == str(planted / "none")
    processes = processes_of(load_config(env={}, overrides=settings), environment)
    try:
        async with asyncio.timeout(LIMIT_S):
            command = [*processes._command(role), "--help"]
            child = await processes.forks.start(role, command)
            assert isinstance(child, Forked) == (method == "forkserver" and ON_LINUX)
            shown = b"".join([chunk async for chunk in child.output()]).decode()
            assert await child.wait() == 0, shown
    finally:
        processes.forks.close()
    assert "planted" not in shown
    assert "--with-parent" not in shown
    assert "Usage: nano-inference" in shown


def test_as_a_module_it_imports_nothing_else_from_the_working_folder(planted: Path) -> None:
    """Python itself puts the working folder first for `python -m`; what is imported before us can
    come from there, and no more."""
    (planted / "json.py").unlink()  # which Python's own start may want
    shutil.rmtree(planted / "nano_inference")
    command = [sys.executable, "-m", "nano_inference", "status", "--bus", "redis://127.0.0.1:1"]
    ran = subprocess.run(command, cwd=planted, capture_output=True, text=True)
    assert "planted" not in ran.stdout + ran.stderr
    assert "can't reach Redis" in ran.stderr


# --- our own lines ----------------------------------------------------------------------------


@pytest.fixture
def logs_restored() -> Iterator[None]:
    root = logging.getLogger()
    configured, before = structlog.get_config(), (root.handlers[:], root.level)
    yield
    structlog.configure(**configured)
    root.handlers[:], root.level = before


def raised(error: Exception, depth: int = 50) -> Exception:
    """An error with a traceback."""
    try:
        if depth:
            raised(error, depth - 1)
        raise error
    except Exception as found:  # noqa: BLE001
        return found


class Chatty:
    """Something that is logged and has a long rendering, or none."""

    def __repr__(self) -> str:
        return "y" * LONG


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def deep(levels: int) -> list[object]:
    found: list[object] = []
    for _ in range(levels):
        found = [found]
    return found


VALUES: dict[str, object] = {
    "ascii": "x" * LONG,
    "escaped": "\x00" * LONG,
    "wide": "\U0001f600" * LONG,
    "surrogates": "\udc80" * LONG,
    "bytes": b"\xff" * LONG,
    "list": ["x" * 1000] * 1000,
    "dict": {f"k{i}": {"a": "x" * 500} for i in range(1000)},
    "deep": deep(5000),
    "integer": 1 << 1_000_000,
    "integers": [1 << 1_000_000],
    "object": Chatty(),
    "objects": [Chatty(), Mute(), {Mute(): (1, 2)}],
}


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("kind", [*VALUES, "all", "traceback"])
@pytest.mark.usefixtures("logs_restored")
def test_no_line_of_ours_is_long(
    capsys: pytest.CaptureFixture[str], kind: str, log_format: str
) -> None:
    setup_logging(TelemetryConfig(log_format=log_format))  # type: ignore[arg-type]
    log = structlog.get_logger().bind(stage="admission")
    if kind == "traceback":
        log.error("stage_failed", exc_info=raised(ValueError("x" * LONG)))
    elif kind == "all":
        log.error("stage_failed", **VALUES)
    else:
        log.error("stage_failed", value=VALUES[kind], other=1.5)
    line = capsys.readouterr().err
    assert len(line.encode(errors="replace")) <= MOST_LOG_BYTES + 1
    assert "stage_failed" in line
    if log_format == "json":
        found = json.loads(line)
        assert (found["level"], found["stage"]) == ("error", "admission")
        assert kind != "traceback" or (
            "Traceback (most recent call last)" in found["exception"]
            and found["exception"].endswith("xxx")
        )


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.usefixtures("logs_restored")
def test_no_line_of_a_library_is_long(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    setup_logging(TelemetryConfig(log_format=log_format))  # type: ignore[arg-type]
    error = raised(ValueError("\x00" * LONG))
    logging.getLogger("some.library").error("%s is long", "\x00" * LONG, exc_info=error)
    line = capsys.readouterr().err
    assert len(line.encode()) <= MOST_LOG_BYTES + 1
    assert log_format == "text" or json.loads(line)["level"] == "error"


@pytest.mark.usefixtures("logs_restored")
def test_a_line_that_fits_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetryConfig(log_format="json"))
    structlog.get_logger().info("said", values=[1, {"a": None}], path="p" * 500, at=2.5)
    found = json.loads(capsys.readouterr().err)
    assert (found["values"], found["path"], found["at"]) == ([1, {"a": None}], "p" * 500, 2.5)


# --- what crosses the bus ---------------------------------------------------------------------


class Broken(Actor):
    """Fails with a long message."""

    name: ClassVar[str] = "batching"

    async def open(self) -> None:
        raise RuntimeError("x" * LONG)

    async def handle(self, envelope: Envelope) -> None: ...

    async def reset(self) -> None: ...


async def test_the_reason_of_a_failure_is_short_where_it_arrives() -> None:
    bus = MemoryBus(Config().bus)
    inbox = await bus.open_inbox("admission")
    context = StageContext(Config(), bus, Tracing(None))
    with capture_logs() as lines, pytest.raises(StageFailed):
        await supervise(lambda: Broken(context), PipelineConfig(max_restarts=0))
    assert [len(line["error"]) for line in lines if line["event"] == "stage_failed"] == [MOST_TEXT]
    (envelope,) = await inbox.receive()
    assert isinstance(envelope.body, StageStopped)
    assert envelope.body.reason.startswith("RuntimeError('xxx")
    assert envelope.body.failed
    assert len(envelope.body.reason) <= MOST_TEXT
    await bus.aclose()


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_an_unknown_field_is_refused_in_few_words(encoding: str) -> None:
    name = "x" * LONG
    request = {"prompt": "1", "sampling": {name: 1}}
    raw = json.dumps(request).encode()
    found = (
        decode_request(raw, "json", 1 << 22)
        if encoding == "json"
        else check_request(request, 1 << 22)
    )
    assert isinstance(found, Malformed)
    assert found.code == "invalid_request"
    assert len(found.message) <= MOST_TEXT
    assert found.message.startswith("sampling.'xxx"), "the path is not what is left out"
    assert found.message.endswith("... is not known here; leave it out")
