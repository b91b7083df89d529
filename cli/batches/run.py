"""The run of a batch from a command: what is answered already, the calls in flight, and a bar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ...config import ConfigError, shown
from ..terminal import complain, stderr
from .calls import Place, Send
from .journal import Answer, Fault, Journal, Response, answer_to, check_same
from .lines import Line, LineMaker
from .tables import cells_of


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class Counts:
    """The numbers of a run, shown as a bar on a terminal.

    Attributes:
        total: Lines of the input.
        answered: Those with an answer, also of earlier runs.
        failed: Those whose answer is an error.
    """

    def __init__(self, total: int, entries: Journal) -> None:
        self.total, self.answered = total, len(entries.entries)
        self.failed = sum(each.failed for each in entries.entries.values())
        self._here = self._tokens = 0
        self._began_s = time.monotonic()
        self._said = False
        self._show: Show = _hide

    def began(self, show: Show) -> None:
        """Begin to count time, and show the numbers."""
        self._began_s, self._show = time.monotonic(), show

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        self.answered += 1
        self._here += 1
        self.failed += answer.failed
        if answer.response is not None:
            self._tokens += _tokens_of(answer.response)
        if answer.failed and not self._said:
            self._said = True
            why = cells_of(answer)[2]
            complain(f"{shown(answer.custom_id)} has an error; further ones are counted: {why}")
        self._show(self.answered, self.total, self.rate)

    @property
    def summary(self) -> str:
        """The numbers as a sentence."""
        failed = f", {self.failed} of them errors (--again sends these anew)" if self.failed else ""
        before = self.answered - self._here
        earlier = f", {before} of them earlier" if before else ""
        whole = f"{self.answered} of {self.total} lines are answered{earlier}{failed}"
        return f"{whole}; {self.rate}" if self._here else whole

    @property
    def rate(self) -> str:
        """Lines and tokens a second."""
        seconds = max(time.monotonic() - self._began_s, 1e-9)
        return f"{self._here / seconds:,.1f} lines/s, {self._tokens / seconds:,.0f} tokens/s"


class Show(Protocol):
    """Shows how many of how many lines are done."""

    def __call__(self, done: int, total: int, rate: str = "") -> None: ...


@contextmanager
def bar() -> Iterator[Show]:
    """Yield what shows a bar with the time left, on a terminal alone."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(
        *columns, console=stderr(), transient=True, disable=not stderr().is_terminal
    ) as made:
        task: list[TaskID] = []

        def show(done: int, total: int, rate: str = "") -> None:
            # Time left is computed of lines that are done from the first call on.
            if not task:
                task.append(made.add_task("", total=total, completed=done, rate=rate))
            made.update(task[0], completed=done, total=total, rate=rate)

        yield show


def _hide(done: int, total: int, rate: str = "") -> None:
    """Show nothing."""


def _tokens_of(response: Response) -> int:
    """Return the number of tokens that were generated."""
    try:
        usage = msgspec.json.decode(response.body, type=_Body).usage or _Usage()
    except msgspec.DecodeError:  # another form, or an error
        return 0
    return usage.completion_tokens or usage.output_tokens


def check(maker: LineMaker, journal: Journal, *, again: bool) -> int:
    """Compare the input and the answers that there are; return the number of lines.

    Args:
        maker: Makes the lines.
        journal: The answers. Those that are errors to lines that have changed are removed.
        again: Whether all errors are, so that their lines are sent again.

    Raises:
        ConfigError: The input has no line, two of one id, or has changed.
    """
    seen: dict[str, int] = {}
    removed: set[str] = set()
    known = 0
    for line in maker.lines():
        if (before := seen.setdefault(line.id, line.row.number)) != line.row.number:
            raise ConfigError(
                f"lines {before} and {line.row.number} have the same custom_id, {shown(line.id)}",
                remedy="give each an id of its own, by which its answer is found",
            )
        if (entry := journal.entries.get(line.id)) is None:
            continue
        known += 1
        if entry.failed and (again or entry.digest != line.digest):
            removed.add(line.id)
        else:
            check_same(line, entry, journal.path)
    if not seen:
        raise ConfigError("the input has no line", remedy="write one call, or one row, in each")
    if known < len(journal.entries):
        id = next(id for id in journal.entries if id not in seen)
        raise ConfigError(
            f"{journal.path} has an answer to {shown(id)}, which the input lacks",
            remedy="write to another file, or delete this one",
        )
    if removed:
        journal.remove(removed)
    return len(seen)


async def answer_all(
    maker: LineMaker,
    journal: Journal,
    place: Place,
    concurrent: int | None,
    *,
    again: bool,
) -> Counts:
    """Answer the lines that have no answer yet.

    Raises:
        NanoInferenceError: As `check`; also the server can't be reached or refuses the key, or
            there is no room for the answers.
    """
    maker.model = await place.model()
    counts = Counts(check(maker, journal, again=again), journal)
    if counts.answered == counts.total:
        return counts
    try:
        async with place.calls() as send:
            with bar() as show:
                counts.began(show)
                await _send_all(maker, journal, counts, send, concurrent or place.concurrent)
    except BaseException:
        complain(f"{counts.summary}; the same command goes on")
        raise
    return counts


async def _send_all(
    maker: LineMaker, journal: Journal, counts: Counts, send: Send, concurrent: int
) -> None:
    slots = asyncio.Semaphore(concurrent)

    async def answer(line: Line, body: bytes) -> None:
        try:
            keep(answer_to(line, await send(line.url, body)))
        finally:
            slots.release()

    def keep(answer: Answer) -> None:
        journal.add(answer)
        counts.add(answer)

    async with asyncio.TaskGroup() as group:
        for line in maker.lines():
            if line.id in journal.entries:
                continue
            if line.body is None:
                keep(answer_to(line, None, Fault("malformed", line.fault)))
                continue
            await slots.acquire()
            group.create_task(answer(line, line.body))
