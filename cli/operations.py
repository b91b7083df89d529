"""Commands that each run one operation of a pipeline, at a server or over a bus.

`COMMANDS` is their table, made by the decorator `command`: a function declares a command's options
and its help, and returns the operation's arguments if they are not its options; the decorator has
the operation's name and what is printed of its result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.cells import cell_len

from ..bus.codec import encode_output
from ..bus.public import Completion, SessionAction
from ..bus.weights import InFlight
from ..config import FairnessConfig
from ..pipeline.operations import Shards
from ..store.service import LaneService
from .clients import client_at, run_operation
from .connection import target_of
from .options import AsJson, Command, Lane, Options, argument, group, option, takes_status_options
from .terminal import cut, harmless, one_line, print_json, print_table, total, ttft

Show = Callable[[Any], None]


class Row(NamedTuple):
    """A command of the table: itself, and the name of its operation."""

    command: Command
    operation: str


COMMANDS: list[Row] = []


def command(
    operation: str,
    show: Show | None = None,
    *,
    what: str = "waiting for the pipeline",
    lines: bool = False,
    failed: Callable[[Any], bool] = lambda result: False,
) -> Callable[[Callable[..., dict[str, Any] | None]], Command]:
    """Make a command of a function with its options, which may return the operation's arguments.

    Args:
        operation: The operation's name.
        show: Prints the result; by default as it is, if it is not None.
        what: Shown while it takes long.
        lines: Whether --json prints each element of the result as a line.
        failed: Whether the exit status is 1 for a result.
    """

    def decorate(declare: Callable[..., dict[str, Any] | None]) -> Command:
        def run(options: Options, *, as_json: bool, **values: Any) -> None:
            result = run_operation(options, operation, declare(**values) or values, what)
            if as_json:
                print_json(*result) if lines else print_json(result)
            elif show is not None:
                show(result)
            elif result is not None:
                typer.echo(result)
            if failed(result):
                raise typer.Exit(1)

        made = _with_options(declare, run)
        COMMANDS.append(Row(made, operation))
        return made

    return decorate


def _with_options(declare: Callable[..., Any], run: Callable[..., None]) -> Command:
    """Return a command with the options of a function, --json, and those that name a pipeline."""
    functools.update_wrapper(run, declare)
    own = inspect.signature(declare, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    as_json = inspect.Parameter("as_json", keyword, default=False, annotation=AsJson)
    options = inspect.Parameter("options", keyword, annotation=Options)
    run.__signature__ = inspect.Signature([*own, as_json, options])  # type: ignore[attr-defined]
    return takes_status_options(run)


def table(
    rows: Callable[[Any], Iterable[Sequence[object]]],
    *names: str,
    empty: str = "",
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
) -> Show:
    """Return what prints a result as a table with these columns."""

    def show(result: Any) -> None:
        cells = [[harmless(str(cell)) for cell in row] for row in rows(result)]
        print_table(names, cells, empty, right=right, fold=fold)

    return show


def _by_lane(found: Mapping[str, Sequence[object]]) -> list[tuple[object, ...]]:
    """Return a row for each element of each lane's sequence."""
    return [
        (lane, index, value) for lane, values in found.items() for index, value in enumerate(values)
    ]


# --- weights and memory ---------------------------------------------------------------------------


@group
def weights() -> None:
    """Read the version of the weights, and replace them while requests are in flight.

        nano-inference weights version

        nano-inference weights update --folder checkpoints/step-200

        nano-inference weights log

    docs/weights.md describes the requests in flight meanwhile, and how trainers do it.
    """


class MemoryKind(StrEnum):
    """The kinds of `MemoryTag`; Typer takes no list of a Literal."""

    weights = "weights"
    kv_cache = "kv_cache"


Tags = Annotated[
    list[MemoryKind] | None, option("--tag", "A part of it. Repeatable; default: all.")
]
AtPause = Annotated[
    InFlight, option("--in-flight", "Requests keep their KV, recompute it, or end.")
]
Timeout = Annotated[float, option("--timeout", "Time limit, in seconds.", min=0)]
Version = Annotated[int | None, option("--version", "The new version; default: the next one.")]


@weights.command()
@command("update_weights", what="updating the weights")
def update(
    folder: Annotated[Path, option("--folder FOLDER", "Checkpoint that the executor can read.")],
    in_flight: AtPause = "keep",
    version: Version = None,
    partial: Annotated[bool, option("--partial", "Keep parameters that the folder lacks.")] = False,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Replace the weights by those of a folder, or change them by a delta; print their version.

    nano-inference weights update --folder checkpoints/step-200 --in-flight retract
    """


@weights.command("roll-back")
@command("update_weights", what="updating the weights")
def roll_back(
    past: Annotated[int, argument("VERSION", "A version of the log of weights.")],
    in_flight: AtPause = "keep",
    version: Version = None,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Put a past version's weights in place, as a new version; print that.

    nano-inference weights roll-back 17
    """


@weights.command("version")
@command("weight_version")
def version_(lane: Lane = None) -> None:
    """Print the version of the weights in target; 0 after loading.

    nano-inference weights version
    """


def _says(word: str) -> Show:
    return lambda _: typer.echo(word)


@command("pause", _says("paused; requests wait until `nano-inference resume`"))
def pause(in_flight: AtPause = "keep", lane: Lane = None) -> None:
    """Pause generation, and return after the current step; requests wait until `resume`.

    nano-inference pause --in-flight retract
    """


@command("resume", _says("resumed"))
def resume(lane: Lane = None) -> None:
    """Resume generation after `pause`.

    nano-inference resume
    """


@command("flush_cache")
def flush_cache(lane: Lane = None) -> None:
    """Empty the prefix cache and the response cache. New weights need no flush.

    nano-inference flush-cache
    """


@command("release_memory")
def release_memory(tags: Tags = None, lane: Lane = None) -> None:
    """Release memory of the device; requests wait until `resume-memory`.

    Released weights are lost: after `resume-memory`, all of them must be sent.

    nano-inference release-memory --tag kv_cache
    """


@command("resume_memory")
def resume_memory(tags: Tags = None, lane: Lane = None) -> None:
    """Allocate released memory again.

    nano-inference resume-memory --tag weights
    """


# --- adapters -------------------------------------------------------------------------------------


@group
def adapters() -> None:
    """List, load and unload LoRA adapters, while requests are in flight.

        nano-inference adapters load sql ./adapters/sql

        nano-inference adapters list

    Requests name an adapter in `model`. With several models, --model names the adapter's:

        nano-inference adapters load sql ./adapters/sql --model code

    See docs/adapters.md.
    """


Id = Annotated[str, argument("ID", "Its name in requests.")]


@adapters.command("list")
@command(
    "adapters",
    table(
        lambda found: [
            (
                each.id,
                each.version,
                each.rank,
                f"{each.num_bytes / (1 << 20):.1f}",
                each.folder or "-",
            )
            for each in found
        ],
        *("id", "version", "rank", "MiB", "folder"),
        empty="no adapter is loaded",
        fold=("folder",),
    ),
)
def list_adapters(lane: Lane = None) -> None:
    """List the adapters that requests can name, of all models or of one.

    nano-inference adapters list
    """


@adapters.command("load")
@command("load_adapter", what="loading the adapter")
def load_adapter(
    id: Id,
    folder: Annotated[Path, argument("FOLDER", "A folder of PEFT that executors can read.")],
    in_flight: AtPause = "keep",
    version: Version = None,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Load an adapter, or new weights for one that is loaded; print its version.

    nano-inference adapters load sql ./adapters/sql
    """


@adapters.command("unload")
@command("unload_adapter")
def unload_adapter(
    id: Id,
    abort: Annotated[bool, option("--abort", "End its requests; default: finish.")] = False,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> dict[str, Any]:
    """Unload an adapter. New requests for it are refused at once.

    nano-inference adapters unload sql
    """
    in_flight = "abort" if abort else "keep"
    return {"id": id, "in_flight": in_flight, "timeout_s": timeout_s, "lane": lane}


# --- experts and roles ----------------------------------------------------------------------------


@group
def experts() -> None:
    """Read which rank owns which expert, and change it while requests run.

        nano-inference experts show

        nano-inference experts move 0 1 0 1

    For models with engine.expert_parallel; see docs/ranks.md. A change lasts until the executor
    restarts.
    """


@experts.command("show")
@command("expert_owners", table(_by_lane, "lane", "expert", "rank"))
def show_experts() -> None:
    """Print the owners in force.

    nano-inference experts show
    """


@experts.command()
@command("move_experts")
def move(
    owners: Annotated[list[int], argument("RANK...", "The owner of each expert.")],
    lane: Lane = None,
) -> None:
    """Give each expert an owner; each rank owns equally many. No token changes.

    nano-inference experts move 0 1 0 1
    """


@group
def roles() -> None:
    """Read the roles of the replicas, and change them while they run.

        nano-inference roles show

        nano-inference roles set prefill decode decode

    See docs/roles.md. A change lasts until the process of the fairness stage restarts.
    """


@roles.command("show")
@command("roles", table(_by_lane, "lane", "replica", "role"))
def show_roles(lane: Lane = None) -> None:
    """Print the roles in force.

    nano-inference roles show
    """


@roles.command("set")
@command("update_roles")
def set_roles(
    roles: Annotated[list[str], argument("ROLE...", "One for each replica.")],
    lane: Lane = None,
) -> None:
    """Give each replica a role: prefill, decode or both. Sequences stay where they run.

    nano-inference roles set prefill decode
    """


# --- fairness -------------------------------------------------------------------------------------


@group
def fairness() -> None:
    """Read the settings of the fairness stage, and change them while it runs.

        nano-inference fairness show

        nano-inference fairness set enable_preemption=true max_timeslice_tokens=64

        nano-inference fairness set tenant_weights.gold=3

        nano-inference fairness shares

    See docs/fairness.md. A change lasts until the stage's process restarts.
    """


NO_EXCHANGE = (
    "no lane tells what it has served; turn it on with `nano-inference fairness set "
    "exchange_interval_s=0.5`"
)


def _show_settings(settings: Mapping[str, FairnessConfig]) -> None:
    lanes = [f"lane {harmless(lane)}" for lane in settings]
    rows = [
        (name, *(harmless(_setting(getattr(config, name))) for config in settings.values()))
        for name in FairnessConfig.__struct_fields__
    ]
    print_table(("setting", *lanes), rows, fold=lanes)


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each:g}" for key, each in value.items()) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)


@fairness.command("show")
@command("fairness", _show_settings)
def show_fairness(lane: Lane = None) -> None:
    """Print the settings in force.

    nano-inference fairness show
    """


@fairness.command("set")
@command("change_fairness", _show_settings)
def set_fairness(
    changes: Annotated[list[str], argument("NAME=VALUE...", "Settings, with YAML values.")],
    lane: Lane = None,
) -> None:
    """Change settings at once, also for current requests; if one is refused, nothing changes.

    nano-inference fairness set aging_s=5 tenant_weights.gold=3
    """


def _show_shares(tables: Sequence[LaneService]) -> None:
    served = {
        each.lane: {(priority, tenant): cost for priority, tenant, cost in each.served}
        for each in tables
    }
    totals: Counter[tuple[int, str]] = Counter()
    of_class: Counter[int] = Counter()
    for entries in served.values():
        totals.update(entries)
    for (priority, _), cost in totals.items():
        of_class[priority] += cost
    rows = [
        (
            str(priority),
            harmless(tenant),
            *(f"{entries.get((priority, tenant), 0):,.0f}" for entries in served.values()),
            f"{cost:,.0f}",
            f"{cost / of_class[priority]:.1%}" if of_class[priority] else "",
        )
        for (priority, tenant), cost in sorted(
            totals.items(), key=lambda item: (-item[0][0], -item[1], item[0][1])
        )
    ]
    lanes = [f"lane {harmless(lane)}" for lane in served]
    if tables:
        print_table(("priority", "tenant", *lanes, "all", "share"), rows, fold=lanes)
    else:
        typer.echo(NO_EXCHANGE)


@fairness.command()
@command("tenant_service", _show_shares)
def shares() -> None:
    """Print what each lane has served to each tenant, with fairness.exchange_interval_s.

    nano-inference fairness shares
    """


# --- shards and sessions --------------------------------------------------------------------------


def _show_shards(found: Shards) -> None:
    before = f", changing from {found.before}" if found.moving else ""
    typer.echo(f"{found.shards}{before}; requests on each: {', '.join(map(str, found.requests))}")


@takes_status_options
def shards(
    options: Options,
    number: Annotated[int | None, argument("NUMBER", "The new number, 1 to 64.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the number of shards of the requests stream, or change it while requests run.

    nano-inference shards 4

    See docs/redis.md. Tenants that move wait for a moment; no request is lost or reordered.
    """
    operation = "shards" if number is None else "set_shards"
    (print_json if as_json else _show_shards)(run_operation(options, operation, {"number": number}))


def _show_session(result: Any) -> None:
    where = f" on the {result.tier}" if result.tier else ""
    why = f" ({result.reason})" if result.reason else ""
    typer.echo(f"{result.outcome}: {result.num_tokens} tokens{where}{why}")


@command(
    "kv_session",
    _show_session,
    failed=lambda result: result.outcome in ("rejected", "missing"),
)
def kv_session(
    action: Annotated[SessionAction, argument("ACTION", "What to do with the KV.")],
    session: Annotated[str, argument("ID", "The session's id in requests.")],
    ttl_s: Annotated[
        float | None, option("--ttl SECONDS", "Time to live from now on; default: as before.")
    ] = None,
    tenant: Annotated[str | None, option("--tenant NAME", "The tenant of its requests.")] = None,
    lane: Lane = None,
) -> None:
    """Pin, release, demote or prefetch the KV of a conversation; print what became of it.

    nano-inference kv-session prefetch agent-7 --ttl 60

    The exit status is 1 if it was rejected, or the session or its KV is missing.
    """


# --- streams --------------------------------------------------------------------------------------

Limit = Annotated[int | None, option("--limit", "Exit after this number.", min=1)]

_WIDTH_OF_PIPES = 120

_HEADING = f"{'request':<20} {'status':<9} {'tokens':>6} {'TTFT ms':>9} {'total ms':>9}  text"


def _follow(
    options: Options,
    operation: str,
    limit: int | None,
    show: Show,
    begin: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> None:
    """Print the results of an operation as they come, until Ctrl-C or up to a number.

    `begin` is called once no result is missed any more.
    """

    target, count = target_of(options), 0

    async def run() -> None:
        nonlocal count
        async with (
            client_at(target, options.served) as client,
            aclosing(client.follow(operation, arguments)) as results,
        ):
            async for each in results:
                begin() if each is None else show(each)
                sys.stdout.flush()
                count += each is not None
                if count == limit:
                    return

    asyncio.run(run())


@takes_status_options
def tail(options: Options, as_json: AsJson = False, limit: Limit = None) -> None:
    """Print every request that ends from now on, of all clients.

    One line for each: id, status, tokens, time to first token, total time, beginning of the text.

        nano-inference tail

        nano-inference tail --json --limit 100 > completions.jsonl

    With --model only the requests that this model has answered. The shared results stream is read
    and not changed. Ctrl-C ends it.
    """
    if as_json:
        _follow(options, "tail", limit, lambda each: typer.echo(encode_output(each)))
        return

    def show(completion: Completion) -> None:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else _WIDTH_OF_PIPES
        typer.echo(_line(completion, width))

    _follow(options, "tail", limit, show, lambda: typer.echo(_HEADING))


def _line(completion: Completion, width: int) -> str:
    """Return a completion as one line of at most `width` columns."""
    if completion.error is not None:
        text = f"{completion.error.code}: {completion.error.message}"
    else:
        text = completion.samples[0].text if completion.samples else ""
    request_id = cut(one_line(completion.request_id or completion.entry_id), 20)
    request_id += " " * (20 - cell_len(request_id))
    return cut(
        f"{request_id} {completion.status:<9} {completion.usage.completion_tokens:>6} "
        f"{ttft(completion):>9} {total(completion):>9}  {one_line(text)}",
        width,
    )


@takes_status_options
def kv_events(
    options: Options,
    kept: Annotated[
        bool, option("--kept", "Begin with the oldest entry that the stream keeps.")
    ] = False,
    limit: Limit = None,
) -> None:
    """Print the KV events of a pipeline that runs with engine.kv_events, one JSON object a line.

    Each has the lane and replica whose cache it is, a sequence number, the number of entries that
    were missed before it, and the events.

        nano-inference kv-events

        nano-inference kv-events --kept --limit 100 > events.jsonl

    The stream is read and not changed. Ctrl-C ends it.
    """
    _follow(options, "kv_events", limit, print_json, kept=kept)


COMMANDS += [
    Row(shards, "shards"),
    Row(shards, "set_shards"),
    Row(tail, "tail"),
    Row(kv_events, "kv_events"),
]
