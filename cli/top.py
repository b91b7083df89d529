"""`nano-inference top`: the state of a pipeline, live."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import signal
import sys
import termios
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, NoReturn

import msgspec
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from ..bus.times import CAUSES
from ..config import BusError, NanoInferenceError
from ..pipeline.health import LATE_S, LaneHealth, problem_of
from ..pipeline.status import PipelineStatus
from ..telemetry.logs import has_cursor
from .clients import Unreachable
from .connection import target_of
from .options import Options, option, takes_status_options
from .status import (
    RESPONSE_COUNTS,
    STATE_STYLES,
    TIERS,
    TIME,
    add_batches,
    drafts_line,
    duration,
    facts_table,
    held_text,
    lane_title,
    progress_line,
    responses_line,
    restarts_of,
    stage_title,
    state_of,
    status_at,
    times_line,
    total,
)
from .terminal import harmless, stdout, table

_BAR = 24
_SPARKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 48
_MOST_BATCHES = 8
_POLL_S = 0.05
_FIXED_LINES = 2  # the head and the keys

_HELP = """\
q, Ctrl-C     end
?             this help, and back
↑ ↓           scroll, also j and k
PgUp PgDn     scroll by a screen; Home and End
s             sort processes and tenants by the next column
p, space      pause, and go on

time          causes of the last hundred requests (docs/time.md)
batch         samples that run, of those that are here
cpu           of one core; several threads may use more than 100 %
memory        resident bytes of the process, without a GPU's
"""


@takes_status_options
def top(
    options: Options,
    once: Annotated[bool, option("--once", "Print one status and exit.")] = False,
    every_s: Annotated[float, option("--every SECONDS", "The interval.", min=0.1)] = 1.0,
) -> None:
    """Watch requests, batches, processes, tenants and models.

    `?` lists the keys, and `q` ends it; on a pipe it prints once. Every process reports about once
    a second:

        nano-inference top

        nano-inference top --url http://127.0.0.1:8000

        nano-inference top --once --bus redis://10.0.0.5:6379

    Tenants are shown of a bus, and of a server without keys.
    """
    target = target_of(options)

    def look() -> PipelineStatus:
        return asyncio.run(status_at(target, options.served))

    if once or not has_cursor(sys.stdout):
        stdout().print(view(look(), History()))
    else:
        Screen(look, every_s).run()


class History(defaultdict[str, deque[float]]):
    """The last tokens per second of each lane."""

    def __init__(self) -> None:
        super().__init__(partial(deque, maxlen=_HISTORY))

    def add(self, found: PipelineStatus) -> None:
        """Add the rates of all lanes."""
        for lane in found.lanes:
            self[lane_title(lane)].append(total(lane, "streaming", "tokens_per_s"))

    def sparks(self, lane: LaneHealth) -> str:
        """Return a lane's last rates as a line of little columns."""
        rates = self[lane_title(lane)]
        most = max(*rates, 1.0) if rates else 1.0
        return "".join(_SPARKS[round(each / most * (len(_SPARKS) - 1))] for each in rates)


# --- the screen -----------------------------------------------------------------------------------

_KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "g": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "G": "end",
    "q": "quit",
    "Q": "quit",
    "?": "help",
    "h": "help",
    "s": "sort",
    "p": "pause",
    " ": "pause",
}
_KEY = re.compile(r"\x1b(?:\[|O)[0-9;]*[A-Za-z~]|.", re.DOTALL)

ORDERS = ("stage", "cpu", "memory")
"""Orders of processes. By `cpu` and `memory`, tenants are in order of samples, else by name."""


class Screen:
    """A status that fills the terminal, is read again and again, and obeys keys.

    Attributes:
        found: The last status.
        offset: Lines above the visible ones.
    """

    def __init__(self, look: Callable[[], PipelineStatus], every_s: float) -> None:
        """Args: reads a status, in a thread; the interval."""
        self._look, self._every_s = look, every_s
        self._history = History()
        self._next_s, self._order = 0.0, 0
        self._is_paused = self._has_help = self._has_ended = False
        self._trouble = ""
        self._lost_s = 0.0  # by the monotonic clock, while there is trouble
        self.found: PipelineStatus | None = None
        self.offset = 0
        # Kept by the last frame, for keys.
        self._room = self._most_offset = 0

    def run(self) -> None:
        """Show it until `q` or Ctrl-C."""
        console = stdout()
        reading: Future[PipelineStatus] | None = None
        size, drawn_s = None, 0.0
        with (
            suppress(KeyboardInterrupt),
            _keys() as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not self._has_ended:
                pressed = keys()
                for key in pressed:
                    self.press(key)
                if reading is None and not self._is_paused and time.monotonic() >= self._next_s:
                    reading = self._start()
                    self._next_s = time.monotonic() + self._every_s
                is_new = reading is not None and reading.done()
                if reading is not None and is_new:
                    self._take(reading)
                    reading = None
                counts = bool(self._trouble) and time.monotonic() - drawn_s >= 1
                if pressed or is_new or counts or size != shutil.get_terminal_size():
                    size, drawn_s = shutil.get_terminal_size(), time.monotonic()
                    live.update(self.frame(console, *size), refresh=True)

    def press(self, key: str) -> None:
        """Obey a key, by its name in `_KEYS`."""
        page = max(1, self._room - 1)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page}
        steps |= {"home": -self._most_offset, "end": self._most_offset}
        match key:
            case "quit":
                self._has_ended = True
            case "help":
                self._has_help, self.offset = not self._has_help, 0
            case "pause":
                self._is_paused, self._next_s = not self._is_paused, 0.0
            case "sort":
                self._order = (self._order + 1) % len(ORDERS)
            case _:
                self.offset = min(max(0, self.offset + steps.get(key, 0)), self._most_offset)

    def frame(self, console: Console, width: int, height: int) -> RenderableType:
        """Return the head, the visible lines, and the keys."""
        body: RenderableType = Text("connecting …", style="dim")
        if self._has_help:
            body = Text(_HELP)
        elif self.found is not None:
            body = view(self.found, self._history, ORDERS[self._order])
        lines = console.render_lines(body, console.options.update(width=width), pad=False)
        self._room = max(1, height - _FIXED_LINES)
        self._most_offset = max(0, len(lines) - self._room)
        self.offset = min(self.offset, self._most_offset)
        visible = lines[self.offset : self.offset + self._room]
        visible += [[]] * (self._room - len(visible))
        shown = Segments([part for line in visible for part in (*line, Segment.line())])
        return Group(self._head(width), shown, self._foot(width, len(lines)))

    def _start(self) -> Future[PipelineStatus]:
        """Read a status in a thread that no end waits for."""
        reading: Future[PipelineStatus] = Future()

        def read() -> None:
            try:
                reading.set_result(self._look())
            except BaseException as error:  # noqa: BLE001  (raised in the main thread)
                reading.set_exception(error)

        threading.Thread(target=read, name="status", daemon=True).start()
        return reading

    def _take(self, reading: Future[PipelineStatus]) -> None:
        try:
            self.found = reading.result()
        except NanoInferenceError as error:
            # A gateway answers with a refusal while its bus is away.
            lost = isinstance(error, BusError | Unreachable)
            if not lost and self.found is None:
                raise
            self._lost_s = self._lost_s if self._trouble else time.monotonic()
            self._trouble = str(error)
        else:
            self._trouble = ""
            self._history.add(self.found)

    def _head(self, width: int) -> Text:
        head = Text("nano-inference", "bold", no_wrap=True, end="\n")
        if self._trouble:
            lost = f"bus unreachable for {duration(time.monotonic() - self._lost_s)}, retrying"
            head.append(f"  {lost}: {self._trouble}", "bold red")
        elif self.found is not None:
            head.append(f"  {self.found.url}  ")
            head.append_text(_readiness(self.found))
        if self._is_paused:
            head = Text.assemble(("paused  ", "bold yellow"), head)
        head.truncate(width, overflow="ellipsis")
        return head

    def _foot(self, width: int, lines: int) -> Text:
        keys = f"q end  ? help  ↑↓ scroll  s sort: {ORDERS[self._order]}  p pause"
        foot = Text(keys, "reverse", no_wrap=True, end="")
        if self._most_offset:
            shown = f"{self.offset + 1}-{min(lines, self.offset + self._room)} of {lines}"
            foot.append(shown.rjust(width - len(keys) - 1))
        foot.truncate(width, pad=True)
        return foot


@contextmanager
def _keys() -> Iterator[Callable[[], list[str]]]:
    """Let keys arrive without Enter; yield a function that waits shortly and returns their names.

    Ctrl-Z is off meanwhile: it would leave a shell on this screen. SIGTERM restores the terminal.
    """
    if not sys.stdin.isatty():
        yield _no_keys
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    quiet = termios.tcgetattr(file)
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    quiet[6][termios.VSUSP] = b"\0"

    def read() -> list[str]:
        if not select.select([file], [], [], _POLL_S)[0]:
            return []
        if not (typed := os.read(file, 1024)):
            raise KeyboardInterrupt  # the terminal has gone
        return [_KEYS.get(key, key) for key in _KEY.findall(typed.decode(errors="replace"))]

    handler = signal.signal(signal.SIGTERM, _terminated)
    termios.tcsetattr(file, termios.TCSANOW, quiet)
    try:
        yield read
    finally:
        with suppress(termios.error):
            termios.tcsetattr(file, termios.TCSANOW, before)
        signal.signal(signal.SIGTERM, handler)


def _no_keys() -> list[str]:
    time.sleep(_POLL_S)
    return []


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


# --- what it shows --------------------------------------------------------------------------------


def view(found: PipelineStatus, history: History, order: str = ORDERS[0]) -> Group:
    """Return a line for the requests, then for each lane its numbers and processes."""
    requests = facts_table(12)
    letters = Text(f"{found.dead_letters} dead letters", "bold red" if found.dead_letters else "")
    counts = f"{found.in_flight:,} in flight, {found.waiting:,} waiting, "
    requests.add_row("requests", Text(f"{counts}{found.queue_length:,} not started, ") + letters)
    if found.progress.reason:
        requests.add_row("progress", Text(progress_line(found.progress), "bold red"))
    if found.held or not found.ready:
        requests.add_row("state", _readiness(found))
    if found.models:
        states = (
            Text(f"{harmless(id)} {state}", STATE_STYLES.get(state, ""))
            for id, state in found.models.items()
        )
        requests.add_row("models", Text(", ").join(states))
    add_batches(requests, found, _MOST_BATCHES)
    parts: list[RenderableType] = [requests]
    for lane in found.lanes:
        parts += [_title(lane), _numbers(lane, history), Text(), _processes(lane, order)]
        if tenants := _tenants(lane, order):
            parts += [Text(), tenants]
    return Group(*parts)


def _readiness(found: PipelineStatus) -> Text:
    if not found.ready:
        return Text(f"not ready: {found.reason}", "red")
    return Text("ready", "green") + held_text(found)


def _title(lane: LaneHealth) -> Text:
    served = (report.load.get("model") for report in lane.stages.values())
    model = lane.model or next((str(each) for each in served if each), "")
    title = f"model {harmless(model)}, lane {lane.lane}" if model else lane_title(lane)
    return Text(title, "bold underline")


def _numbers(lane: LaneHealth, history: History) -> Table:
    stages = ("fairness", "batching", "streaming", "executor")
    fairness, batching, streaming, executor = (partial(total, lane, stage) for stage in stages)
    made = facts_table(12)
    made.columns[1].no_wrap = False
    rate = streaming("tokens_per_s")
    sparks = history.sparks(lane)
    made.add_row("tokens/s", Text.assemble((f"{rate:<10,.0f}", "bold"), (sparks, "green")))
    p50, p95 = streaming("ttft_ms_p50"), streaming("ttft_ms_p95")
    made.add_row("first token", f"{p50:,.1f} ms median, {p95:,.1f} ms p95" if p50 else "none yet")
    shares = {f"{TIME}{cause}": streaming(f"{TIME}{cause}") for cause in CAUSES}
    if any(shares.values()):
        made.add_row(
            "time", times_line({name: share for name, share in shares.items() if share}, 4)
        )
    running, waiting = batching("running"), batching("waiting")
    queued = fairness("queued")
    made.add_row("queue", f"{queued:,.0f} in fairness, {waiting:,.0f} in batching")
    if others := fairness("other_lanes"):
        own, elsewhere = fairness("service"), fairness("service_elsewhere")
        share = own / (own + elsewhere) if own + elsewhere else 0.0
        made.add_row("service", f"{share:.0%} of that of {others + 1:,.0f} lanes")
    made.add_row("batch", _bar(running, running + waiting + fairness("credits"), "samples"))
    if any("draft_tokens" in report.load for report in lane.stages.values()):
        counts = map(executor, ("drafts", "draft_tokens", "accepted_tokens"))
        made.add_row("drafts", drafts_line(*counts))
    if any("responses" in report.load for report in lane.stages.values()):
        counts = map(partial(total, lane, "admission"), RESPONSE_COUNTS)
        made.add_row("responses", responses_line(*counts))
    blocks = batching("kv_total")
    cached = f"used, {batching('kv_cached'):,.0f} cached"
    made.add_row("KV blocks", _bar(blocks - batching("kv_free"), blocks, cached))
    if pinned := batching("kv_pinned"):
        made.add_row("", f"{pinned:,.0f} pinned by sessions")
    if most := batching("state_snapshots_total"):
        made.add_row("states", _bar(batching("state_snapshots"), most, "snapshots"))
    for tier, where in TIERS.items():
        if most := batching(f"kv_{tier}_total"):
            made.add_row("", _bar(batching(f"kv_{tier}"), most, where))
    return made


def _bar(value: float, total: float, what: str) -> Text:
    share = min(1.0, value / total) if total else 0.0
    filled = round(share * _BAR)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(
        ("█" * filled, style),
        ("░" * (_BAR - filled), "dim"),
        f" {value:,.0f} of {total:,.0f} {what} ({share:.0%})",
    )


def _processes(lane: LaneHealth, order: str) -> Table:
    """Return the stages with the processor time and memory of their processes."""
    names = ("stage", "state", "for", "process", "cpu", "memory", "")
    made = table(*names, right=("for", "cpu", "memory"), fold=("process", ""))
    made.header_style = "dim"
    reports = list(lane.stages.values())
    if order != ORDERS[0]:
        by_cpu = order == "cpu"
        reports.sort(key=lambda each: each.cpu if by_cpu else each.memory_bytes, reverse=True)
    seen: set[tuple[str, int]] = set()
    for report in reports:
        process = report.host, report.pid
        state = state_of(report)
        problem = problem_of(report, lane.epoch).removeprefix(f"{report.stage} ")
        late = f"silent for {report.age_s:.0f} s" if report.age_s > LATE_S else ""
        trouble = late or problem
        # Stages of one process share its numbers.
        again = process in seen
        made.add_row(
            stage_title(lane, report),
            Text(state, STATE_STYLES.get(state, "bold red")),
            duration(report.since_s + report.age_s),
            f"{report.pid}@{report.host}",
            Text("〃" if again else f"{report.cpu:.0%}", "dim" if again else ""),
            Text("〃" if again else decimal(report.memory_bytes), "dim" if again else ""),
            Text.assemble((trouble, "red"), "  " * bool(trouble), (restarts_of(report), "yellow")),
        )
        seen.add(process)
    return made


def _tenants(lane: LaneHealth, order: str) -> Table | None:
    """Return the tenants with samples; None if they are hidden, or there are none."""
    sums: dict[str, tuple[int, int]] = {}
    for report in lane.stages.values():
        with suppress(msgspec.DecodeError):
            text = str(report.load.get("tenants", "{}"))
            sums |= msgspec.json.decode(text, type=dict[str, tuple[int, int]])
    if not sums:
        return None
    made = table("tenant", "running", "waiting", right=("running", "waiting"), fold=("tenant",))
    made.header_style = "dim"
    rows = sorted(sums.items())
    if order != ORDERS[0]:
        rows.sort(key=lambda row: -sum(row[1]))
    for tenant, (running, waiting) in rows:
        made.add_row(harmless(tenant), f"{running:,}", f"{waiting:,}")
    return made
