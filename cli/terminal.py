"""Output to terminals and pipes, shared by the commands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio
import msgspec
import typer
from rich.box import Box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from ..bus.public import Completion
from ..config import ConfigError, NanoInferenceError, RequestError, line_safe, role_of
from ..config.clock import milliseconds
from ..store.board import StageReport
from ..telemetry import LogOutput
from ..telemetry.logs import has_colours

PROGRAM = "nano-inference"

STAGE_STYLES = {
    "admission": "cyan",
    "fairness": "magenta",
    "batching": "yellow",
    "executor": "green",
    "streaming": "blue",
}

_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
Failures = type[NanoInferenceError] | tuple[type[NanoInferenceError], ...]

PATIENCE_S = 2.0
"""After this time a command shows that it works."""

LINE_EVERY_S = 10.0
"""Seconds between two lines of progress when there is no terminal."""

_LOOK_EVERY_S = 0.25

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


class _PipedConsole(Console):
    """A console that raises BrokenPipeError, where Rich's ends the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


stdout = partial(_PipedConsole, highlight=False, markup=False, emoji=False)
"""Makes a console for standard output that reads no markup in prompts and answers."""

stderr = partial(stdout, stderr=True)


class Complaints:
    """The form of this process's complaints.

    Attributes:
        as_json: Whether each is a line of a log in JSON.
    """

    as_json = False


def complain(sentence: str) -> None:
    """Write one sentence to standard error, on one line; ignore errors."""
    sentence = " ".join(sentence.split())
    line = json_line(sentence, level="error") if Complaints.as_json else f"{PROGRAM}: {sentence}\n"
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(line)
        sys.stderr.flush()


def json_line(event: str, **fields: str) -> str:
    """Return a line of a log in JSON."""
    at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"event": event, **fields, "timestamp": at}).decode() + "\n"


@contextmanager
def failures_exit(kinds: Failures = RequestError) -> Iterator[None]:
    """Print why a request was refused or failed, and exit with status 1."""
    try:
        yield
    except kinds as error:
        complain(f"{error} ({error.code})")
        raise typer.Exit(1) from None


def bars(console: Console) -> Progress:
    """Return progress bars that disappear at the end."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


async def show_loading(
    read: Callable[[], Awaitable[Iterable[StageReport]]],
    executors: int,
    console: Console,
    given_up: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Show a bar for each executor that loads its model, until none does; nothing off terminals.

    Args:
        read: Returns the stages' reports.
        executors: Their number. One without a report has yet to load its code.
        console: The console of other lines.
        given_up: Returns executors that are not started again.
    """
    if not console.is_terminal:
        return
    await anyio.sleep(PATIENCE_S)
    with bars(console) as progress, _below_logs():
        tasks = {role_of("executor", index): TaskID(0) for index in range(executors)}
        for role in tasks:
            tasks[role] = progress.add_task(f"loading {role}", total=None)
        while tasks:
            for role in tasks.keys() & given_up():
                progress.remove_task(tasks.pop(role))
            for report in await read():
                if (task := tasks.get(report.stage)) is None:
                    continue
                if report.state == "starting":
                    share = float(report.load.get("loaded", 0))
                    progress.update(task, completed=share, total=1 if share else None)
                else:
                    progress.remove_task(tasks.pop(report.stage))
            await anyio.sleep(_LOOK_EVERY_S)


@contextmanager
def _below_logs() -> Iterator[None]:
    """Let log lines of this process appear above a bar."""
    LogOutput.has_bar = True
    try:
        yield
    finally:
        LogOutput.has_bar = False


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a bar and the time on standard error, if it is a terminal and this takes long.

    Args:
        what: The awaited work, as "loading code".
        console: Replaces standard error.
    """
    console = console or stderr()
    progress = bars(console)
    progress.add_task(what, total=None)
    timer = threading.Timer(PATIENCE_S, progress.start)
    timer.daemon = True
    started_s = time.monotonic()
    with said_lines(lambda: f"{what}, {time.monotonic() - started_s:.0f} s", console):
        if console.is_terminal:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if timer.is_alive():
                timer.join()
            if progress.live.is_started:
                progress.stop()


@contextmanager
def said_lines(say: Callable[[], str], console: Console) -> Iterator[None]:
    """Write a line every ten seconds on how far something is, unless on a terminal.

    Args:
        say: Returns the sentence; called in a thread.
        console: Standard error.
    """
    ended = threading.Event()

    def say_all() -> None:
        while not ended.wait(LINE_EVERY_S):
            if Complaints.as_json:
                console.file.write(json_line(say(), level="info"))
                continue
            console.print(f"{PROGRAM}: {say()}", soft_wrap=True)

    thread = threading.Thread(target=say_all, daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def print_json(*values: object) -> None:
    """Print each value as a line of JSON."""
    for value in values:
        typer.echo(line_safe(msgspec.json.encode(value)).decode())


def read_input(file: Path) -> bytes:
    """Return the content of a file, or of standard input if it is "-".

    Raises:
        ConfigError: It can't be read.
    """
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}; give a readable file") from None


def table(
    *columns: str, right: Iterable[str] = (), fold: Iterable[str] = (), box: Box | None = None
) -> Table:
    """Return a table, by default without lines.

    Args:
        columns: Their headings.
        right: Columns aligned to the right.
        fold: Columns that may wrap.
        box: Its lines.
    """
    made = Table(box=box, pad_edge=False)
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in fold,
            overflow="fold" if name in fold else "ellipsis",
        )
    return made


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str = "",
    *,
    right: Iterable[str] = (),
    fold: Iterable[str] = (),
) -> None:
    """Print a table as by `table`, or if there are no rows a sentence."""
    if not rows:
        typer.echo(empty)
        return
    made = table(*columns, right=right, fold=fold)
    for row in rows:
        made.add_row(*row)
    stdout().print(made)


def date(stamp_ns: int, *, seconds: bool = True) -> str:
    """Return a date and time of this time zone."""
    form = "%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(stamp_ns / 1e9))


def begin_ns(completion: Completion) -> int:
    """Return when a request was published, as its causes of time have it, or else received; 0 if
    neither is known."""
    timings = completion.timings
    return min(filter(None, (timings.published_ns, timings.received_ns)), default=0)


def ttft(completion: Completion) -> str:
    """Return the time to the first token in milliseconds; "-" without one."""
    first_ns = completion.timings.first_token_ns
    return milliseconds(first_ns - begin_ns(completion)) if first_ns else "-"


def total(completion: Completion) -> str:
    """Return the time of a request in milliseconds; "-" if admission has not received it."""
    timings = completion.timings
    received = timings.received_ns
    return milliseconds(timings.finished_ns - begin_ns(completion)) if received else "-"


def harmless(text: str) -> str:
    """Return the text without control characters: a model may write escape sequences too."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """Return the text with visible line ends, and harmless."""
    shown = text.strip().replace("\r\n", "\n").replace("\n", " ↵ ")
    return harmless(shown.replace("\t", " "))


def cut(text: str, cells: int) -> str:
    """Return the beginning of a text, at most `cells` columns wide, with "…" where it was cut."""
    line = Text(text, no_wrap=True)
    line.truncate(cells, overflow="ellipsis")
    return line.plain


class AnswerWriter:
    """Writes an answer to standard output as it arrives; leaving the context ends the line.

    Attributes:
        text: The text so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._reasoning = ""
        self._on_terminal = sys.stdout.isatty()
        self._has_colours = has_colours(sys.stdout)

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.text or self._reasoning:
            self._write("\n")

    def reason(self, piece: str) -> None:
        """Write a piece of the reasoning, which is no part of the answer: only on a terminal."""
        if self._on_terminal and piece:
            self._reasoning += harmless(piece)
            shown = harmless(piece)
            self._write(f"{_DIM}{shown}{_PLAIN}" if self._has_colours else shown)

    def write(self, piece: str) -> None:
        """Write the next piece."""
        if self._reasoning and piece:
            self._write("\n" if self._reasoning.endswith("\n") else "\n\n")
            self._reasoning = ""
        self.text += piece
        self._write(harmless(piece) if self._on_terminal else piece)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
