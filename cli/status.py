"""`nano-inference status` and `health`: the state of a pipeline."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..config import (
    REPLICATED,
    STAGES,
    BusConfig,
    BusError,
    ConfigError,
    nearest,
    redact,
    split_role,
)
from ..pipeline.health import (
    LATE_S,
    LaneHealth,
    lanes_of,
    living_first,
    problem_of,
    role_trouble,
    roles_of,
)
from ..pipeline.models import FACTS
from ..pipeline.progress import Progress, progress_of
from ..pipeline.status import PipelineStatus
from ..store.board import STALE_AFTER_S, StageReport
from .bus_status import BusStatus, bus_status
from .clients import ServerClient, Unreachable
from .connection import ServerAddress, Target, connected, run_with, target_of
from .options import AsJson, Options, option, takes_status_options
from .running import found
from .terminal import harmless, one_line, print_json, stdout, table

TIERS = {"host": "in host memory", "disk": "on disk"}
"""KV tiers below the device, as shown."""

RESPONSE_COUNTS = ("responses", "response_hits", "response_lookups")
"""Numbers of the response cache in a load."""

TIME = "time_"
"""Before a cause of time, in a load."""

_SHOWN_LINKS = 3
_SHOWN_BATCHES = 3
_NARROW = 72
"""Columns of a terminal below which the times of stages are left out."""
# Shown by `nano-inference fairness show` and `nano-inference models`, or for programs.
_SHOWN_ELSEWHERE = frozenset(
    {"settings", "tenants", "roles", "received", "expert_owners", "busy_s", "held", *FACTS}
    | {"accounts_since_ns", "busy_ns", "billed_ns"}
)
_DETAILS = frozenset(
    {"credits", "set_aside", "plans", "steps", "open", "deterministic", "inbox"}
    | {"step_age_s", "token_age_s"}
    | {"preemptions", "yields", "resumes"}
)
# Hidden while 0.
_RARE = frozenset(("recovering", "paused", "handovers"))
STATE_STYLES = {"ready": "green", "starting": "yellow", "waiting": "yellow", "draining": "yellow"}


@takes_status_options
def status(
    options: Options,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, option("--verbose -v", "Show links, clients, and all numbers.")
    ] = False,
) -> None:
    """Show whether the pipeline is ready, the requests in flight, and its stages.

    The exit status is 0 when every stage of at least one lane is ready, else 1, with the reason.
    The status is read from Redis, so it works even if the pipeline does not; that of `serve` is
    read from its port:

        nano-inference status

        nano-inference status --url http://127.0.0.1:8000

        nano-inference status --bus redis://10.0.0.5:6379 --json

        watch nano-inference status
    """
    read = asyncio.run(status_at(target_of(options), options.served))
    if as_json:
        print_json(read)
    else:
        stdout().print(rendered(read, verbose=verbose))
    if not read.ready:
        raise typer.Exit(1)


async def status_at(target: Target, model: str | None = None) -> PipelineStatus:
    """Return the status of a pipeline, or of one of its models, at a server or a bus."""
    if isinstance(target, ServerAddress):
        async with ServerClient(target) as client:
            return await client.status(model)
    read = await bus_status(target, model)
    return read if read.lanes else _starting(read, target.bus)


def _starting(read: BusStatus, bus: BusConfig) -> BusStatus:
    """Return the status of a bus without reports, which says so if an `up` of this user starts."""
    for each in found():
        if each.command != "gateway" and (each.bus, each.prefix) == (redact(bus.url), bus.prefix):
            age = duration(time.time() - each.started_at)
            why = f"`{each.command}` (process {each.pid}) has been starting for {age}"
            return msgspec.structs.replace(read, reason=why)
    return read


def rendered(found: PipelineStatus, *, verbose: bool = False) -> Group:
    """Return a status for people.

    Args:
        found: The status.
        verbose: Add the bus, its clients, and all numbers of the stages.
    """
    parts: list[Table | Text] = [_overview(found, verbose=verbose)]
    for lane in found.lanes:
        parts.append(lane_table(lane, verbose=verbose, narrow=stdout().width < _NARROW))
        for stage in lane.rivals:
            warning = f"more than one process runs the {stage} stage of {lane_title(lane)}"
            parts.append(Text(f"{warning}; give each pipeline a bus.lane of its own", "bold red"))
    return Group(*parts)


def held_text(found: PipelineStatus) -> Text:
    """Return why no step is computed and what to do, after "ready"; empty if steps may be."""
    if not found.held:
        return Text()
    said = found.held.replace("generation is paused", "generation paused")
    command = "resume" if "paused" in said else "resume-memory"
    return Text(f", {said} (resume with `nano-inference {command}`)", "bold yellow")


def facts_table(width: int) -> Table:
    """Return an empty table of names, `width` columns wide, and facts."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True, width=width)
    made.add_column(overflow="fold")
    return made


def total(lane: LaneHealth, stage: str, name: str) -> float:
    """Return a number of a lane's stage, summed over replicas."""
    loads = (each.load for role, each in lane.stages.items() if split_role(role)[0] == stage)
    values = (load.get(name, 0) for load in loads)
    return sum(value for value in values if isinstance(value, int | float))


def _overview(found: PipelineStatus, *, verbose: bool) -> Table:
    made = facts_table(9)
    if found.ready:
        count = sum(lane.ready for lane in found.lanes)
        which = "" if len(found.lanes) == 1 else f", {count} of {len(found.lanes)} lanes"
        state = Text(f"ready{which}", "bold green") + held_text(found)
    else:
        state = Text(f"not ready: {found.reason}", "bold red")
    rate = sum(total(lane, "streaming", "tokens_per_s") for lane in found.lanes)
    counts = f"{found.in_flight:,} in flight, {rate:,.0f} tokens/s, {found.waiting:,} waiting"
    made.add_row("pipeline", state)
    if found.progress.reason:
        style = "bold red" if found.progress.status == "stalled" else "yellow"
        made.add_row("progress", Text(progress_line(found.progress), style))
    made.add_row("requests", counts)
    if found.dead_letters:
        letters = f"{found.dead_letters:,} dead letters; see `nano-inference dlq list`"
        made.add_row("", Text(letters, "bold red"))
    if found.models:
        made.add_row("models", ", ".join(f"{id} {state}" for id, state in found.models.items()))
    add_batches(made, found, None if verbose else _SHOWN_BATCHES)
    made.add_row("at", found.url)
    if isinstance(found, BusStatus):
        if found.last_taken_s is not None and not found.ready:
            made.add_row("", f"last read requests {duration(found.last_taken_s)} ago")
        if verbose:
            _add_bus(made, found)
    return made


def add_batches(made: Table, found: PipelineStatus, most: int | None = None) -> None:
    """Add unfinished batches to a table of facts, if there are any; `most`: None for all."""
    if not found.open_batches:
        return
    rate = sum(each.lines_per_s for each in found.batches)
    counts = f"{found.open_batches:,} open, {rate:,.1f} lines/s"
    if found.batches:
        oldest = duration(max(0, time.time() - found.batches[0].created_s))
        counts += f", the oldest made {oldest} ago"
    made.add_row("batches", counts)
    for each in found.batches[:most]:
        failed = f", {each.failed:,} failed" if each.failed else ""
        done = f"{each.completed + each.failed:,} of {each.total:,} lines{failed}"
        text = f"{harmless(each.id)} {each.status}, {done}, tenant {harmless(each.tenant)}"
        unseen_s = time.time() - each.seen_s
        late = Text(f", not seen for {duration(unseen_s)}" if unseen_s > LATE_S else "", "bold red")
        made.add_row("", Text(text) + late)
    if left := found.open_batches - len(found.batches[:most]):
        made.add_row("", f"and {left:,} more")


def _add_bus(made: Table, found: BusStatus) -> None:
    made.add_row("bus", f"{found.server}, prefix {found.prefix}")
    made.add_row("queue", f"{found.queue_length:,} requests not started")
    if len(found.shards) > 1:
        made.add_row("shards", f"{len(found.shards)}, with {', '.join(map(str, found.shards))}")
    fullest = sorted(found.links.items(), key=lambda link: -link[1])[:_SHOWN_LINKS]
    busy = [f"{name} ≤ {count}" for name, count in fullest if count]
    made.add_row("links", ", ".join(busy) or "empty")
    made.add_row("results", f"{found.results} kept in the shared stream")
    clients, others = [], 0
    for name, count in found.connections.items():
        if name.startswith("client"):
            clients.append(f"{name} ({count})" if count > 1 else name)
        elif not name.startswith(STAGES):  # those are in the table below
            others += count
    if others:
        clients.append(f"{others} other connection{'s' * (others > 1)}")
    made.add_row("clients", ", ".join(clients) or "none")


def lane_title(lane: LaneHealth) -> str:
    """Return a lane's name, with its model if there are several."""
    return f"model {lane.model}, lane {lane.lane}" if lane.model else f"lane {lane.lane}"


def stage_title(lane: LaneHealth, report: StageReport) -> str:
    """Return a stage's name, with the role of its replica if it has one."""
    stage, replica = split_role(report.stage)
    role = roles_of(lane)[replica] if stage in REPLICATED else "both"
    return report.stage if role == "both" else f"{report.stage} ({role})"


def state_of(report: StageReport) -> str:
    """Return a stage's state, or that its process is silent, stopped or gone."""
    if report.process_state in ("stopped", "gone"):
        return report.process_state
    return "silent" if report.age_s > LATE_S else report.state


def lane_table(lane: LaneHealth, *, verbose: bool = False, narrow: bool = False) -> Table:
    """Return the last reports of a lane's stages.

    Args:
        lane: The lane.
        verbose: With all numbers.
        narrow: Without the times, for a terminal with no room for them.
    """
    times = () if narrow else ("for", "heard")
    names = ("stage", "state", *times[:1], "process", *times[1:], "load")
    made = table(*names, right=times, fold=("process", "load"), box=box.SIMPLE_HEAD)
    made.title = Text(lane_title(lane) + (f", epoch {lane.epoch}" if verbose else ""), "bold")
    made.title_justify = "left"
    for report in lane.stages.values():
        late, state = report.age_s > LATE_S, state_of(report)
        ages = (
            Text(duration(report.since_s + report.age_s)),
            Text(f"{report.age_s:.1f} s", "bold red" if late else ""),
        )
        made.add_row(
            stage_title(lane, report),
            Text(state, STATE_STYLES.get(state, "bold red")),
            *ages[: len(times) // 2],
            f"{report.pid}@{report.host}",
            *ages[1 : len(times)],
            ", ".join(filter(None, (_state_or_load(lane, report, verbose), restarts_of(report)))),
        )
    return made


def _state_or_load(lane: LaneHealth, report: StageReport, verbose: bool) -> str:
    problem = problem_of(report, lane.epoch).removeprefix(f"{report.stage} ")
    return problem or _load(report, verbose=verbose)


def restarts_of(report: StageReport) -> str:
    """Return how often a stage was restarted, when and why; "" if it was not."""
    count, cause, at_s = msgspec.structs.astuple(report.restarts)
    if not count:
        return ""
    ago = duration(max(0.0, time.time() - at_s))
    last = "" if count == 1 else "the last "
    why = f": {harmless(one_line(cause))}" if cause else ""
    return f"{count} restart{'s' * (count > 1)}, {last}{ago} ago{why}"


def _load(report: StageReport, *, verbose: bool) -> str:
    hidden = set(_SHOWN_ELSEWHERE)
    if not verbose:
        hidden |= _DETAILS | {name for name in _RARE if not report.load.get(name)}
    load = {name: value for name, value in report.load.items() if name not in hidden}
    texts: list[str] = []
    if not verbose and (median_ms := load.pop("ttft_ms_p50", None)) is not None:
        load.pop("ttft_ms_p95", None)
        texts.append(f"first token {median_ms:,.0f} ms")
    if "kv_total" in load:
        free, total = load.pop("kv_free"), load.pop("kv_total")
        cached, pinned = load.pop("kv_cached", 0), load.pop("kv_pinned", 0)
        by_sessions = f", {pinned} pinned by sessions" if pinned else ""
        texts.append(f"KV blocks {free} of {total} free, {cached} cached{by_sessions}")
    if "state_snapshots" in load:
        number, most = load.pop("state_snapshots"), load.pop("state_snapshots_total")
        texts.append(f"{number} of {most} state snapshots")
    if "kv_host" in load:
        tiers = [f"{load.pop(f'kv_{tier}')} of {load.pop(f'kv_{tier}_total')}" for tier in TIERS]
        texts.append(f"below: {tiers[0]} blocks in host memory, {tiers[1]} on disk")
    if "kv_states_host" in load:
        tiers = [
            f"{load.pop(f'kv_states_{tier}')} of {load.pop(f'kv_states_{tier}_total')}"
            for tier in TIERS
        ]
        texts.append(f"{tiers[0]} snapshots in host memory, {tiers[1]} on disk")
    if "rank_bytes" in load:
        sizes = [decimal(int(each)) for each in str(load.pop("rank_bytes")).split(",")]
        texts.append(f"{load.pop('ranks')} ranks of {', '.join(sizes)} memory")
    if "draft_tokens" in load:
        counts = (load.pop("drafts", 0), load.pop("draft_tokens"), load.pop("accepted_tokens", 0))
        texts.append(f"drafts: {drafts_line(*counts)}")
    if "responses" in load:
        texts.append(responses_line(*map(load.pop, RESPONSE_COUNTS)))
    if shares := {name: load.pop(name) for name in list(load) if name.startswith(TIME)}:
        texts.append(f"time: {times_line(shares)}")
    called = {"tokens_per_s": "tokens/s"}
    texts[:0] = [
        f"{called.get(name) or name.replace('_', ' ')} {value}" for name, value in load.items()
    ]
    return ", ".join(texts)


def times_line(shares: Mapping[str, Any], most: int = 3) -> str:
    """Return the largest causes of the time of requests, as "own decode 61 %".

    Args:
        shares: In thousandths, by name in a load.
        most: Number of causes.
    """
    largest = sorted(shares.items(), key=lambda item: -item[1])[:most]
    named = ((name.removeprefix(TIME).replace("_", " "), share) for name, share in largest)
    return ", ".join(f"{cause} {share / 10:.0f} %" for cause, share in named)


def responses_line(responses: Any, hits: Any, lookups: Any) -> str:
    """Return the numbers of the response cache as text."""
    return f"{responses:,.0f} cached responses, {hits:,.0f} of {lookups:,.0f} lookups found one"


def drafts_line(drafts: Any, draft_tokens: Any, accepted: Any) -> str:
    """Return the share of accepted draft tokens, and the tokens of a step, as text."""
    if not draft_tokens:
        return "none yet"
    share, tokens = accepted / draft_tokens, 1 + accepted / drafts
    return f"{share:.0%} of their tokens accepted, {tokens:.1f} tokens a step"


def duration(seconds: float) -> str:
    """Return a duration as a whole number of a fitting unit, as "3 h"."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# --- health ---------------------------------------------------------------------------------------


@takes_status_options
def health(
    options: Options,
    stage: Annotated[list[str] | None, option("--stage NAME", "Only these. Repeatable.")] = None,
    live: Annotated[bool, option("--live/--ready", "Check liveness or readiness.")] = False,
    progress: Annotated[bool, option("--progress", "Check that tokens come.")] = False,
    host: Annotated[str | None, option("--host", "Host of the process; default: this.")] = None,
    role: Annotated[str | None, option("--role ROLE", "Of the lane: prefill or decode.")] = None,
) -> None:
    """Check the stages on this host: exit status 0 if they are healthy, else 1.

    For probes such as Kubernetes' `exec`, in the container of the process:

        nano-inference health --live

        nano-inference health --ready --stage executor

        nano-inference health --ready --role decode

        nano-inference health --progress

        nano-inference health --url http://127.0.0.1:8000

    Live: the process has reported within the last seconds. Ready: each of its stages is in the
    lane's current epoch; of several models, those of each that runs here. While Redis is
    unreachable, a process counts as live, since a restart would not bring Redis back, and as not
    ready. With --progress: live, and not stalled, which is without a token or a step for
    `pipeline.stall_timeout_s` with requests in flight; it names the last token's age. With --role:
    whether some replica of the lane with that role is ready, wherever it runs.
    With --url the probes of a server are called, such as that of `serve`; they need no key.
    """
    if role not in (None, "prefill", "decode"):
        raise ConfigError(f"there is no role {role!r:.80}; roles are prefill and decode")
    if role and (live or stage or host):
        raise ConfigError("--role is for readiness of a whole lane; leave the other options out")
    if progress and (role or live or stage):
        raise ConfigError("--progress is for all stages of a host; leave the other options out")
    if isinstance(server := target_of(options), ServerAddress):
        if stage or host:
            raise ConfigError(
                "--stage and --host are for a bus; a server answers for all stages",
                remedy="leave them out",
            )
        _check_server(server, options.served, role, live=live, progress=progress)
        return
    for name in stage or ():
        if split_role(name)[0] not in STAGES:
            raise ConfigError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    config = options.client_config("error")
    try:
        found = run_with(
            connected(config, options.served), lambda client: client.deployment.reports()
        )
    except BusError as error:
        typer.echo(f"{'unknown' if live or progress else 'not ready'}: {error}")
        raise typer.Exit(0 if live or progress else 1) from None
    here = host or socket.gethostname()
    if role:
        lanes = [lane for lane in lanes_of(found) if lane.lane == config.bus.lane]
        _print_problems(list(filter(None, [role_trouble(lanes, role)])), live=False)
        return
    live = live or progress  # what is gone makes no progress
    problems = [
        problem
        for model in sorted({report.model for report in found if report.host == here}) or [""]
        for problem in _problems(found, model, config.bus.lane, here, stage or [], live=live)
    ]
    if progress and not problems:
        lanes = [lane for lane in lanes_of(found) if lane.lane == config.bus.lane]
        seen = progress_of(lanes, config.pipeline.stall_timeout_s, here)
        typer.echo(progress_line(seen))
        raise typer.Exit(1 if seen.status == "stalled" else 0)
    _print_problems(problems, live=live)


def progress_line(progress: Progress) -> str:
    """Return the state of lanes with their requests as text, as "ok, last token 0.4 s ago"."""
    token = progress.token_age_s
    parts = [progress.status, f"last token {duration(token)} ago" if token is not None else ""]
    line = ", ".join(filter(None, parts))
    return f"{line}: {progress.reason}" if progress.reason else line


def _print_problems(problems: list[str], *, live: bool) -> None:
    typer.echo("\n".join(problems) if problems else "live" if live else "ready")
    if problems:
        raise typer.Exit(1)


def _check_server(
    server: ServerAddress, model: str | None, role: str | None, *, live: bool, progress: bool
) -> None:
    """Raises typer.Exit with status 1: the probe fails, or nothing answers."""
    word = "making progress" if progress else "live" if live else "ready"
    path = "/livez" if live else f"/readyz?role={role}" if role else "/readyz"
    if progress:
        path = "/progressz"
    elif model is not None and not live:
        path = f"/v2/models/{quote(model, safe='')}/ready"
    try:
        problem = run_with(ServerClient(server), lambda client: client.probe(path))
    except Unreachable as error:
        problem = str(error)
    typer.echo(f"not {word}: {problem}" if problem else word)
    if problem:
        raise typer.Exit(1)


def _problems(
    found: list[StageReport], model: str, lane: str, host: str, stages: list[str], *, live: bool
) -> list[str]:
    """Return the problems of a model's stages on a host: of these, or of all there if empty."""
    reports = [report for report in found if report.model == model]
    where = f"lane {lane}" + (f" of model {model}" if model else "") + f" on {host}"
    # Of a process and its successor on the same host, the last one that reported.
    here: dict[str, StageReport] = {}
    for report in living_first(reports):
        if (report.lane, report.host) == (lane, host):
            here.setdefault(report.stage, report)
    silent = f"not heard of for {STALE_AFTER_S:.0f} s"
    problems = [f"the {name} stage of {where}: {silent}" for name in stages if name not in here]
    if not here and not stages:
        problems = [f"no stage of {where}: {silent}"]
    if not live:
        epochs = {each.lane: each.epoch for each in lanes_of(reports)}
        checked = (here[name] for name in stages or here if name in here)
        problems += filter(None, (problem_of(report, epochs[lane]) for report in checked))
    return problems
