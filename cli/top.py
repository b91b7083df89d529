"""`nano-inference top`: the pipeline as it works, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from functools import partial
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..config import BusError
from ..pipeline.health import LaneHealth
from ..pipeline.status import PipelineStatus
from .answerer import Place
from .http_calls import Unreachable
from .options import Options, takes_looking_options
from .status import look_at, place_looked_at
from .status_view import drafts_line, lane_speculates, lane_table, lane_title, total
from .terminal import stdout

_BAR = 30
_SPARKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


@takes_looking_options
def top(
    options: Options,
    once: Annotated[bool, typer.Option("--once", help="Print one look and leave.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
) -> None:
    """Watch the stages, queues, batch, tokens per second, first tokens and KV blocks.

    Until Ctrl-C, or once where standard output is not a terminal. The numbers are those that every
    process tells about once a second, over Redis, or to the server that `serve` runs:

        nano-inference top

        nano-inference top --url http://127.0.0.1:8000

        nano-inference top --once --bus redis://10.0.0.5:6379
    """
    place = place_looked_at(options)
    history = History()
    if once or not sys.stdout.isatty():
        stdout().print(view(asyncio.run(look_at(place, options.served)), history))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(place, options.served, history, every_s)


def _watch(place: Place, model: str | None, history: History, every_s: float) -> None:
    shown: RenderableType = Text("looking …", style="dim")
    with Live(shown, console=stdout(), screen=True, auto_refresh=False) as live:
        while True:
            started = time.monotonic()
            try:
                shown = view(asyncio.run(look_at(place, model)), history)
                live.update(shown, refresh=True)
            except (BusError, Unreachable) as error:
                trouble = Text(f"{error.message}; trying again", style="bold red")
                live.update(Group(trouble, shown), refresh=True)
            time.sleep(max(0.05, every_s - (time.monotonic() - started)))


class History:
    """Tokens per second of each lane, of the last looks."""

    def __init__(self) -> None:
        self._of_lane: dict[str, deque[float]] = {}

    def add(self, lane: str, rate: float) -> str:
        """Takes what a look showed; returns the last ones as a line of little columns."""
        rates = self._of_lane.setdefault(lane, deque(maxlen=_HISTORY))
        rates.append(rate)
        most = max(*rates, 1.0)
        return "".join(_SPARKS[round(each / most * (len(_SPARKS) - 1))] for each in rates)


def view(found: PipelineStatus, history: History) -> Group:
    """One look: a line for the requests, then for each lane its numbers and its stages."""
    state = Text("ready", "green") if found.ready else Text(f"not ready: {found.reason}", "red")
    head = Text.assemble(("nano-inference ", "bold"), f"{found.url}   ", state)
    requests = Table(box=None, show_header=False, pad_edge=False)
    requests.add_column(style="bold", no_wrap=True, width=12)
    requests.add_column()
    dead = Text(f"{found.dead_letters} dead letters", "bold red" if found.dead_letters else "")
    counts = f"{found.waiting} on the stream, {found.in_flight} taken"
    requests.add_row("requests", Text(f"{counts}, {found.queue_length} not begun, ") + dead)
    parts: list[RenderableType] = [head, requests]
    for lane in found.lanes:
        parts += [_numbers(lane, history), lane_table(lane)]
    return Group(*parts)


def _numbers(lane: LaneHealth, history: History) -> Table:
    load = partial(total, lane)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, width=12)
    table.add_column(no_wrap=True)
    rate = load("streaming", "tokens_per_s")
    sparks = history.add(lane_title(lane), rate)
    table.add_row("tokens/s", Text.assemble((f"{rate:<10,.0f}", "bold"), (sparks, "green")))
    p50, p95 = load("streaming", "ttft_ms_p50"), load("streaming", "ttft_ms_p95")
    table.add_row(
        "first token", f"{p50:,.1f} ms median, {p95:,.1f} ms for 95 of 100" if p50 else ""
    )
    queued, running = load("fairness", "queued"), load("batching", "running")
    places = running + load("batching", "waiting") + load("fairness", "credits")
    table.add_row(
        "queue", f"{queued:,.0f} in fairness, {load('batching', 'waiting'):,.0f} in batching"
    )
    table.add_row("batch", _bar(running, places, "samples"))
    blocks = load("batching", "kv_total")
    used = blocks - load("batching", "kv_free")
    if lane_speculates(lane):
        drafts, drafted = load("executor", "drafts"), load("executor", "draft_tokens")
        accepted = load("executor", "accepted_tokens")
        table.add_row("drafts", drafts_line(drafts, drafted, accepted))
    table.add_row("KV blocks", _bar(used, blocks, "used"))
    table.add_row("", f"{load('batching', 'kv_cached'):,.0f} can be found by new samples")
    return table


def _bar(value: float, total: float, what: str) -> Text:
    share = min(1.0, value / total) if total else 0.0
    filled = round(share * _BAR)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(
        ("█" * filled, style),
        ("░" * (_BAR - filled), "dim"),
        f" {value:,.0f} of {total:,.0f} {what} ({share:.0%})",
    )
