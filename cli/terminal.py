"""Output to terminals and pipes, shared by the commands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import typer
from rich.box import Box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bus.public import Completion
from ..config import ConfigError, NanoInferenceError, RequestError
from ..telemetry.clock import milliseconds

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

_PATIENCE_S = 2.0
"""After this time a command shows that it works."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


stdout = partial(Console, highlight=False, markup=False, emoji=False)
"""Makes a console for standard output that reads no markup in prompts and answers."""

stderr = partial(stdout, stderr=True)


def complain(sentence: str) -> None:
    """Write one sentence to standard error, on one line; ignore errors."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"{PROGRAM}: {' '.join(sentence.split())}\n")
        sys.stderr.flush()


@contextmanager
def failures_exit(kinds: Failures = RequestError) -> Iterator[None]:
    """Print why a request was refused or failed, and exit with status 1."""
    try:
        yield
    except kinds as error:
        complain(f"{error.message} ({error.code})")
        raise typer.Exit(1) from None


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a bar and the time on standard error, if it is a terminal and this takes long.

    Args:
        what: What is waited for, as "loading code".
        console: Replaces standard error.
    """
    console = console or stderr()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(what, total=None)
    timer = threading.Timer(_PATIENCE_S, progress.start)
    timer.daemon = True
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


def print_json(*values: object) -> None:
    """Print each value as a line of JSON."""
    for value in values:
        typer.echo(msgspec.json.encode(value).decode())


def read_input(file: Path) -> bytes:
    """Return the content of a file, or of standard input if it is "-".

    Raises:
        ConfigError: It can't be read.
    """
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None


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


def ttft(completion: Completion) -> str:
    """Return the time to the first token in milliseconds; "-" without one."""
    timings = completion.timings
    first_ns = timings.first_token_ns
    return milliseconds(first_ns - timings.received_ns) if first_ns else "-"


def total(completion: Completion) -> str:
    """Return the time of a request in milliseconds; "-" if admission has not received it."""
    timings = completion.timings
    received_ns = timings.received_ns
    return milliseconds(timings.finished_ns - received_ns) if received_ns else "-"


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

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.text or self._reasoning:
            self._write("\n")

    def reason(self, piece: str) -> None:
        """Write a piece of the reasoning, which is no part of the answer: only on a terminal."""
        if self._on_terminal and piece:
            self._reasoning += harmless(piece)
            self._write(f"{_DIM}{harmless(piece)}{_PLAIN}")

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
