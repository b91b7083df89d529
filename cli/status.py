"""`nano-inference status`: what waits where and who works on it, read from Redis itself."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..bus import ModelState, StageReport
from ..bus.keys import Keys
from ..bus.links import all_links
from ..config import STAGES, BusConfig, BusError, Config, redact
from ..pipeline.health import LATE_S, LaneHealth, lanes_of, problem_of, replicas_of, verdict
from ..pipeline.models import FACTS
from .connection import connected, find_served, unreachable
from .options import Options, takes_model_options
from .terminal import stdout

_SHOWN_LINKS = 3
# By `nano-inference fairness show` and `nano-inference models`.
_SHOWN_ELSEWHERE = ("settings", *FACTS)
_OWN_NAME = "status"
_STYLES = {"ready": "green", "starting": "yellow", "waiting": "yellow", "draining": "yellow"}


class BusStatus(msgspec.Struct, frozen=True):
    """What one look at Redis showed.

    Attributes:
        ready: Whether every stage of at least one lane is there and takes part.
        reason: Why not, in one sentence.
        url: The bus's URL, without password.
        server: Name and version.
        prefix: First part of the keys.
        waiting: Requests that nobody has taken.
        in_flight: Requests taken and not yet answered.
        queue_length: Requests of which no sample has begun, whether they were taken or not; about a
            second old.
        dead_letters: Requests that were given up; see `nano-inference dlq`.
        last_taken_s: Seconds since an admission last asked for requests; None when none ever did.
        results: Completions in the shared results stream.
        lanes: The lanes, with what each stage told last.
        links: Messages that wait on each link that is carried over Redis, at most: a reader removes
            what it has read a while later. Of lanes other than "0" the link's name follows the
            lane's and a colon.
        connections: Connections to the server, by client name; "" for those without.
        models: Of several models how each is; the numbers above are those of all together, and the
            names of links begin with the model's and a colon.
    """

    ready: bool
    reason: str
    url: str
    server: str
    prefix: str
    waiting: int
    in_flight: int
    queue_length: int
    dead_letters: int
    last_taken_s: float | None
    results: int
    lanes: list[LaneHealth]
    links: dict[str, int]
    connections: dict[str, int]
    models: dict[str, ModelState] = {}


@takes_model_options
def status(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Show the stages of every lane, what waits where, and who is connected.

    The exit status is 0 when every stage of at least one lane is there and ready, else 1, and a
    sentence says why. It looks at Redis itself, so it works when the pipeline does not:

        nano-inference status

        nano-inference status --bus redis://10.0.0.5:6379 --json

        watch nano-inference status
    """
    config = options.client_config()
    found = asyncio.run(look(config, options.served))
    if as_json:
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
    else:
        stdout().print(_rendered(found))
    if not found.ready:
        raise typer.Exit(1)


async def look(config: Config, model: str | None = None) -> BusStatus:
    """Takes one look at Redis, in a few round trips for each model.

    Args:
        model: Only this one, by one of its names; all when None.

    Raises:
        BusError: Redis can't be reached, or refuses a command that can't be done without.
        RequestError: unknown_model.
    """
    try:
        async with connected(config) as client:
            records = {} if config.bus.model else await client.bus.models.read()
            chosen = None if model is None else await find_served(client, model)
    except BusError as error:
        raise unreachable(config.bus, error) from None
    if not records:
        return await _look_at(config.bus)
    states = {id: each.state for id, each in records.items() if chosen in (None, id)}
    each = [await _look_at(replace(config.bus, model=id)) for id in states]
    entrance = await _look_at(config.bus) if chosen is None else None
    return _together(states, each, entrance)


def _together(
    states: dict[str, ModelState], each: Sequence[BusStatus], entrance: BusStatus | None
) -> BusStatus:
    """What was seen of models, and of the entrance before them, as one."""
    reasons = [
        status.reason if state in ("ready", "draining") else f"it is {state}"
        for status, state in zip(each, states.values(), strict=True)
    ]
    ready = not all(reasons)
    named = zip(states, reasons, strict=True)
    taken = [status.last_taken_s for status in each if status.last_taken_s is not None]
    every = [*each, entrance] if entrance else list(each)
    return replace(
        every[-1],  # of the server all say the same
        ready=ready,
        reason="" if ready else "; ".join(f"model {name}: {why}" for name, why in named),
        waiting=sum(status.waiting for status in every),
        in_flight=sum(status.in_flight for status in each),
        queue_length=sum(status.queue_length for status in every),
        last_taken_s=min(taken, default=None),
        lanes=[lane for status in each for lane in status.lanes],
        links={
            f"{model}:{name}": length
            for model, status in zip(states, each, strict=True)
            for name, length in status.links.items()
        },
        models=states,
    )


async def _look_at(config: BusConfig) -> BusStatus:
    """One look at what a bus is of: a model, or the only one, or the entrance."""
    # redis-py is loaded only here, so that `--help` stays fast.
    from ..bus.redis.bus import RedisBus

    bus = RedisBus(config)
    try:
        lanes = lanes_of(await bus.stages.read())
        names = sorted({lane.lane for lane in lanes} | set(await bus.lanes()))
        replicas = {lane.lane: 1 + replicas_of(lane.stages)[-1] for lane in lanes}
        links_of = [
            (name, link.name) for name in names for link in all_links(replicas.get(name, 1))
        ]
    except BusError as error:
        raise unreachable(config, error) from None
    finally:
        await bus.aclose()
    replies = await _ask(config, links_of)
    info, length, dead, results, queue_length, pending, consumers, clients, *links = replies
    # These two fail while no pipeline has ever run here and made the group.
    in_flight = 0 if isinstance(pending, Exception) else int(pending["pending"])
    idle_ms = [] if isinstance(consumers, Exception) else [int(c[b"idle"]) for c in consumers]
    reason = verdict(lanes)
    return BusStatus(
        ready=not reason,
        reason=reason,
        url=_address(config),
        server=_server_name(info),
        prefix=config.prefix,
        # What is answered is deleted, so the rest of the stream has not been taken. (Redis's own
        # figure of that, the group's lag, is unknown once an entry was deleted unread.)
        waiting=max(0, int(length) - in_flight),
        in_flight=in_flight,
        # Where no lane lives, nothing has begun.
        queue_length=int(length if queue_length is None else queue_length),
        dead_letters=int(dead),
        last_taken_s=min(idle_ms) / 1000 if idle_ms else None,
        results=int(results),
        lanes=lanes,
        links=dict(zip(map(_link_name, links_of), map(int, links), strict=True)),
        connections=_connections(clients),
    )


def _address(config: BusConfig) -> str:
    return redact(config.url)


def _link_name(link: tuple[str, str]) -> str:
    lane, name = link
    return name if lane == "0" else f"{lane}:{name}"


async def _ask(config: BusConfig, links: list[tuple[str, str]]) -> list[Any]:
    """The replies to what the board does not tell. `links`: (lane, name) of each."""
    from redis import exceptions

    from ..bus.redis.client import Server, execute_all, on_each

    server = Server(config.url, _OWN_NAME)
    redis = server.client(1)
    keys = Keys(config.prefix, config.lane, config.model)
    lengths = [keys.link(name, lane) for lane, name in links]
    commands = [
        ("XLEN", keys.requests),
        ("XLEN", keys.dead),
        ("XLEN", keys.results),
        ("GET", keys.queue_length),
        ("XPENDING", keys.requests, config.group),
        ("XINFO", "CONSUMERS", keys.requests, config.group),
        *(("XLEN", key) for key in lengths),
    ]
    try:
        replies = await execute_all(redis, commands, raise_on_error=False)
        extras = []
        for command in (("INFO", "server"), ("CLIENT", "LIST")):
            try:
                extras.append(await on_each(redis, *command))
            except exceptions.ResponseError:  # forbidden to this user; there is less to show
                extras.append([])
    except (exceptions.RedisError, OSError) as error:
        raise unreachable(config, server.explain(error)) from None
    finally:
        await redis.aclose()
        await server.aclose()
    for reply in (*replies[:4], *replies[6:]):
        if isinstance(reply, Exception):
            raise server.explain(reply)
    infos, clients = extras
    return [infos[0] if infos else {}, *replies[:6], clients, *replies[6:]]


def _server_name(info: Any) -> str:
    fields = _fields(info)
    for product, name in (("valkey_version", "Valkey"), ("redis_version", "Redis")):
        if product in fields:
            return f"{name} {fields[product]}"
    return "unknown"


def _fields(info: Any) -> dict[str, str]:
    """The reply of INFO, parsed or not."""
    if isinstance(info, dict):
        return {_text(name): _text(value) for name, value in info.items()}
    lines = (line.partition(":") for line in _text(info).splitlines())
    return {name: value.strip() for name, _, value in lines}


def _connections(lists: list[Any]) -> dict[str, int]:
    """From each CLIENT LIST, parsed or a line of `name=value` fields for each connection."""
    names: Counter[str] = Counter()
    for clients in lists:
        if not isinstance(clients, list):
            lines = _text(clients).splitlines()
            clients = [dict(field.partition("=")[::2] for field in line.split()) for line in lines]
        names.update(_text(fields.get("name", "")) for fields in clients)
    del names[_OWN_NAME]
    return dict(sorted(names.items()))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _rendered(found: BusStatus) -> Group:
    parts: list[Table | Text] = [_overview(found)]
    for lane in found.lanes:
        parts.append(lane_table(lane))
        for stage in lane.rivals:
            warning = f"more than one process runs the {stage} stage of {lane_title(lane)}"
            parts.append(Text(f"{warning}; give each pipeline a bus.lane of its own", "bold red"))
    return Group(*parts)


def _overview(found: BusStatus) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, width=9)
    table.add_column(overflow="fold")
    table.add_row("bus", f"{found.url}  ({found.server}, prefix {found.prefix})")
    if found.ready:
        count = sum(lane.ready for lane in found.lanes)
        which = "" if len(found.lanes) == 1 else f", {count} of {len(found.lanes)} lanes"
        table.add_row("pipeline", Text(f"ready{which}", "green"))
    else:
        table.add_row("pipeline", Text(f"not ready: {found.reason}", "bold red"))
    if found.models:
        table.add_row("models", ", ".join(f"{id} {state}" for id, state in found.models.items()))
    dead = Text(f"{found.dead_letters} dead letters", "bold red" if found.dead_letters else "")
    counts = f"{found.waiting} waiting, {found.in_flight} in flight"
    requests = Text(f"{counts}, {found.queue_length} not begun, ")
    table.add_row("requests", requests + dead)
    if found.last_taken_s is not None and not found.ready:
        table.add_row("", f"last asked for {duration(found.last_taken_s)} ago")
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
    return table


def lane_title(lane: LaneHealth) -> str:
    """What a lane is called; of several models with its model."""
    return f"model {lane.model}, lane {lane.lane}" if lane.model else f"lane {lane.lane}"


def lane_table(lane: LaneHealth) -> Table:
    """The stages of a lane: what each told last."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{lane_title(lane)}, epoch {lane.epoch}",
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
        state = "silent" if late else report.state
        table.add_row(
            report.stage,
            Text(state, _STYLES.get(state, "bold red")),
            duration(report.since_s + report.age_s),
            f"{report.pid}@{report.host}",
            heard,
            problem_of(report, lane.epoch).removeprefix(f"{report.stage} ") or _load(report),
        )
    return table


def _load(report: StageReport) -> str:
    load = dict(report.load)
    for name in _SHOWN_ELSEWHERE:
        load.pop(name, None)
    texts: list[str] = []
    if "kv_total" in load:
        free, total = load.pop("kv_free"), load.pop("kv_total")
        cached = load.pop("kv_cached", 0)
        texts.append(f"KV blocks {free} of {total} free, {cached} cached")
    if "draft_tokens" in load:
        counts = (load.pop("drafts", 0), load.pop("draft_tokens"), load.pop("accepted_tokens", 0))
        texts.append(f"drafts: {drafts_line(*counts)}")
    texts[:0] = [f"{name.replace('_', ' ')} {value}" for name, value in load.items()]
    return ", ".join(texts)


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
