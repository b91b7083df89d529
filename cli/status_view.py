"""How `status` and `top` show what they have seen."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..config import STAGES, split_role
from ..pipeline.health import LATE_S, LaneHealth, problem_of
from ..pipeline.models import FACTS
from ..pipeline.status import PipelineStatus
from ..store.board import StageReport
from .bus_status import BusStatus

_SHOWN_LINKS = 3
# By `nano-inference fairness show` and `nano-inference models`.
_SHOWN_ELSEWHERE = ("settings", *FACTS)
_DETAILS = frozenset(
    (
        *("credits", "set_aside", "plans", "steps", "open", "deterministic"),
        *("preemptions", "yields", "resumes"),
    )
)
# Shown only while there is some.
_RARE = frozenset(("recovering", "paused"))
_CALLED = {"tokens_per_s": "tokens/s"}
_STYLES = {"ready": "green", "starting": "yellow", "waiting": "yellow", "draining": "yellow"}


def rendered(found: PipelineStatus, *, verbose: bool = False) -> Group:
    """A look for people: first of all whether requests are served, and how many.

    Args:
        found: What was seen.
        verbose: With what the bus holds, its clients, and all numbers of the stages.
    """
    parts: list[Table | Text] = [_overview(found, verbose=verbose)]
    for lane in found.lanes:
        parts.append(lane_table(lane, verbose=verbose))
        for stage in lane.rivals:
            warning = f"more than one process runs the {stage} stage of {lane_title(lane)}"
            parts.append(Text(f"{warning}; give each pipeline a bus.lane of its own", "bold red"))
    return Group(*parts)


def total(lane: LaneHealth, stage: str, name: str) -> float:
    """A number of a stage of a lane, of all replicas together."""
    values = (
        report.load.get(name, 0)
        for role, report in lane.stages.items()
        if split_role(role)[0] == stage
    )
    return sum(value for value in values if isinstance(value, int | float))


def _overview(found: PipelineStatus, *, verbose: bool) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, width=9)
    table.add_column(overflow="fold")
    if found.ready:
        count = sum(lane.ready for lane in found.lanes)
        which = "" if len(found.lanes) == 1 else f", {count} of {len(found.lanes)} lanes"
        state = Text(f"ready{which}", "bold green")
    else:
        state = Text(f"not ready: {found.reason}", "bold red")
    rate = sum(total(lane, "streaming", "tokens_per_s") for lane in found.lanes)
    counts = f"{found.in_flight:,} in flight, {rate:,.0f} tokens/s, {found.waiting:,} waiting"
    table.add_row("pipeline", state)
    table.add_row("requests", counts)
    if found.dead_letters:
        letters = f"{found.dead_letters:,} dead letters; see `nano-inference dlq list`"
        table.add_row("", Text(letters, "bold red"))
    if found.models:
        table.add_row("models", ", ".join(f"{id} {state}" for id, state in found.models.items()))
    table.add_row("at", found.url)
    if isinstance(found, BusStatus):
        if found.last_taken_s is not None and not found.ready:
            table.add_row("", f"last asked for requests {duration(found.last_taken_s)} ago")
        if verbose:
            _add_bus(table, found)
    return table


def _add_bus(table: Table, found: BusStatus) -> None:
    """What a look at Redis shows beyond requests and stages."""
    table.add_row("bus", f"{found.server}, prefix {found.prefix}")
    table.add_row("queue", f"{found.queue_length:,} requests not begun")
    fullest = sorted(found.links.items(), key=lambda link: -link[1])[:_SHOWN_LINKS]
    busy = [f"{name} ≤ {count}" for name, count in fullest if count]
    table.add_row("links", ", ".join(busy) if busy else "nothing waits")
    table.add_row("results", f"{found.results} kept in the shared stream")
    names = [
        f"{name} ({count})" if count > 1 else name
        for name, count in found.connections.items()
        # Those of the stages are in the table below.
        if name and name.startswith("client")
    ]
    others = sum(
        count
        for name, count in found.connections.items()
        if not name.startswith(("client", *STAGES))
    )
    if others:
        names.append(f"{others} other connections" if others > 1 else "1 other connection")
    table.add_row("clients", ", ".join(names) or "none")


def lane_title(lane: LaneHealth) -> str:
    """What a lane is called; of several models with its model."""
    return f"model {lane.model}, lane {lane.lane}" if lane.model else f"lane {lane.lane}"


def lane_table(lane: LaneHealth, *, verbose: bool = False) -> Table:
    """The stages of a lane: what each told last. `verbose`: with all numbers."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=lane_title(lane) + (f", epoch {lane.epoch}" if verbose else ""),
        title_justify="left",
        title_style="bold",
    )
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("process", overflow="fold")
    table.add_column("heard", no_wrap=True, justify="right")
    table.add_column("load", overflow="fold")
    for report in lane.stages.values():
        late = report.age_s > LATE_S
        heard = Text(f"{report.age_s:.1f} s", "bold red" if late else "")
        state: str = "silent" if late else report.state
        if report.process_state in ("stopped", "gone"):
            state = report.process_state
        table.add_row(
            report.stage,
            Text(state, _STYLES.get(state, "bold red")),
            duration(report.since_s + report.age_s),
            f"{report.pid}@{report.host}",
            heard,
            problem_of(report, lane.epoch).removeprefix(f"{report.stage} ")
            or _load(report, verbose=verbose),
        )
    return table


def _load(report: StageReport, *, verbose: bool) -> str:
    load = {
        name: value
        for name, value in report.load.items()
        if name not in _SHOWN_ELSEWHERE and (verbose or _tells(name, value))
    }
    texts: list[str] = []
    if not verbose and (median_ms := load.pop("ttft_ms_p50", None)) is not None:
        load.pop("ttft_ms_p95", None)
        texts.append(f"first token {median_ms:,.0f} ms")
    if "kv_total" in load:
        free, total = load.pop("kv_free"), load.pop("kv_total")
        cached = load.pop("kv_cached", 0)
        texts.append(f"KV blocks {free} of {total} free, {cached} cached")
    if "draft_tokens" in load:
        counts = (load.pop("drafts", 0), load.pop("draft_tokens"), load.pop("accepted_tokens", 0))
        texts.append(f"drafts: {drafts_line(*counts)}")
    texts[:0] = [f"{_called(name)} {value}" for name, value in load.items()]
    return ", ".join(texts)


def _tells(name: str, value: object) -> bool:
    """Whether a number tells something to people who don't know the stages from inside."""
    return name not in _DETAILS and (bool(value) or name not in _RARE)


def _called(name: str) -> str:
    return _CALLED.get(name) or name.replace("_", " ")


def lane_speculates(lane: LaneHealth) -> bool:
    """Whether an executor of a lane tells of drafts."""
    return any("draft_tokens" in report.load for report in lane.stages.values())


def drafts_line(drafts: Any, draft_tokens: Any, accepted: Any) -> str:
    """What became of drafts, as their numbers tell it."""
    if not draft_tokens:
        return "none yet"
    share, tokens = accepted / draft_tokens, 1 + accepted / drafts
    return f"{share:.0%} of their tokens accepted, {tokens:.1f} tokens a step"


def duration(seconds: float) -> str:
    """In whole numbers of what fits, as "3 h"."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
