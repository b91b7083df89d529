"""`nano-inference top`: the status of a pipeline, repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from functools import partial
from typing import Annotated

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..config import BusError
from ..pipeline.health import LaneHealth
from ..pipeline.status import PipelineStatus
from .clients import Unreachable
from .options import Options, option, takes_status_options
from .status import drafts_line, facts_table, lane_table, lane_title, status_at, status_place, total
from .terminal import stdout

_BAR = 30
_SPARKS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


@takes_status_options
def top(
    options: Options,
    once: Annotated[bool, option("--once", "Print one status and exit.")] = False,
    every_s: Annotated[float, option("--every", "The interval.", "SECONDS", min=0.1)] = 1.0,
) -> None:
    """Watch the stages, queues, batch, tokens per second, first tokens and KV blocks.

    Until Ctrl-C; once if standard output is not a terminal. Every process reports the numbers
    about once a second, over Redis, or to the server that `serve` runs:

        nano-inference top

        nano-inference top --url http://127.0.0.1:8000

        nano-inference top --once --bus redis://10.0.0.5:6379
    """
    place, history = status_place(options), History()

    def look() -> Group:
        return view(asyncio.run(status_at(place, options.served)), history)

    if once or not sys.stdout.isatty():
        stdout().print(look())
        return
    shown: RenderableType = Text("connecting …", style="dim")
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(shown, console=stdout(), screen=True, auto_refresh=False) as live,
    ):
        while True:
            started = time.monotonic()
            try:
                shown = look()
                live.update(shown, refresh=True)
            except (BusError, Unreachable) as error:
                trouble = Text(f"{error.message}; trying again", style="bold red")
                live.update(Group(trouble, shown), refresh=True)
            time.sleep(max(0.05, every_s - (time.monotonic() - started)))


class History:
    """The last tokens per second of each lane."""

    def __init__(self) -> None:
        self._of_lane: dict[str, deque[float]] = {}

    def add(self, lane: str, rate: float) -> str:
        """Add a rate; return the last rates as a line of little columns."""
        rates = self._of_lane.setdefault(lane, deque(maxlen=_HISTORY))
        rates.append(rate)
        most = max(*rates, 1.0)
        return "".join(_SPARKS[round(each / most * (len(_SPARKS) - 1))] for each in rates)


def view(found: PipelineStatus, history: History) -> Group:
    """Return a line for the requests, then for each lane its numbers and its stages."""
    state = Text("ready", "green") if found.ready else Text(f"not ready: {found.reason}", "red")
    head = Text.assemble(("nano-inference ", "bold"), f"{found.url}   ", state)
    requests = facts_table(12)
    dead = Text(f"{found.dead_letters} dead letters", "bold red" if found.dead_letters else "")
    counts = f"{found.waiting} on the stream, {found.in_flight} taken"
    requests.add_row("requests", Text(f"{counts}, {found.queue_length} not started, ") + dead)
    parts: list[RenderableType] = [head, requests]
    for lane in found.lanes:
        parts += [_numbers(lane, history), lane_table(lane)]
    return Group(*parts)


def _numbers(lane: LaneHealth, history: History) -> Table:
    load = partial(total, lane)
    batching, streaming, executor = (
        partial(load, stage) for stage in ("batching", "streaming", "executor")
    )
    table = facts_table(12)
    table.columns[1].no_wrap = True
    rate = streaming("tokens_per_s")
    sparks = history.add(lane_title(lane), rate)
    table.add_row("tokens/s", Text.assemble((f"{rate:<10,.0f}", "bold"), (sparks, "green")))
    p50, p95 = streaming("ttft_ms_p50"), streaming("ttft_ms_p95")
    table.add_row("first token", f"{p50:,.1f} ms median, {p95:,.1f} ms p95" if p50 else "")
    running, waiting = batching("running"), batching("waiting")
    queued = load("fairness", "queued")
    table.add_row("queue", f"{queued:,.0f} in fairness, {waiting:,.0f} in batching")
    places = running + waiting + load("fairness", "credits")
    table.add_row("batch", _bar(running, places, "samples"))
    if any("draft_tokens" in report.load for report in lane.stages.values()):
        counts = map(executor, ("drafts", "draft_tokens", "accepted_tokens"))
        table.add_row("drafts", drafts_line(*counts))
    blocks = batching("kv_total")
    table.add_row("KV blocks", _bar(blocks - batching("kv_free"), blocks, "used"))
    table.add_row("", f"{batching('kv_cached'):,.0f} in the prefix cache")
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
