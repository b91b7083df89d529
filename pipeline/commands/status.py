"""`nano-inference status`: what waits where, read from Redis itself."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.table import Table

from ...bus.keys import Keys
from ...bus.links import LINKS
from ...config import BusConfig
from ...telemetry import setup_logging
from .connection import unreachable
from .options import BusUrl, ConfigFile, LogLevel, Settings, build_client_config
from .terminal import stdout

# Admission asks for requests every 5 s when none come; what is silent for longer is not there,
# or has its hands full.
_SILENT_AFTER_S = 8.0


class BusStatus(msgspec.Struct, frozen=True):
    """What one look at Redis showed.

    Attributes:
        url: The bus's URL, without password.
        server: Name and version.
        prefix: First part of the keys.
        waiting: Requests that nobody has taken.
        in_flight: Requests taken and not yet answered.
        last_taken_s: Seconds since admission last asked for requests; None when none ever did.
        epoch: Counts up each time that a stage came back.
        results: Completions in the shared results stream.
        links: Messages that wait on each link that is carried over Redis, at most: a reader removes
            what it has read a while later.
        connections: Connections to the server, by client name; "" for those without.
    """

    url: str
    server: str
    prefix: str
    waiting: int
    in_flight: int
    last_taken_s: float | None
    epoch: int
    results: int
    links: dict[str, int]
    connections: dict[str, int]


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
    bus: BusUrl = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    log_level: LogLevel = None,
) -> None:
    """Show what waits where, and who is connected.

    It looks at Redis itself, so it works when the pipeline does not:

        nano-inference status

        nano-inference status --bus redis://10.0.0.5:6379 --json

        watch nano-inference status
    """
    config = build_client_config(config_file, bus, settings, log_level)
    setup_logging(config.telemetry)
    found = asyncio.run(look(config.bus))
    if as_json:
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
    else:
        stdout().print(_table(found))


async def look(config: BusConfig) -> BusStatus:
    """Takes one look at Redis, in one round trip.

    Raises:
        BusError: Redis can't be reached, or refuses a command that can't be done without.
    """
    # redis-py is loaded only here, so that `--help` stays fast.
    from redis import exceptions

    from ...bus.redis_client import Server

    server = Server(config.url)
    redis = server.client(1)
    keys = Keys(config.prefix)
    try:
        pipeline = redis.pipeline(transaction=False)
        pipeline.execute_command("INFO", "server")
        pipeline.execute_command("XLEN", keys.requests)
        pipeline.execute_command("XPENDING", keys.requests, config.group)
        pipeline.execute_command("XINFO", "CONSUMERS", keys.requests, config.group)
        pipeline.execute_command("GET", keys.epoch)
        pipeline.execute_command("XLEN", keys.results)
        # These may be forbidden to this user; then there is just less to show.
        pipeline.execute_command("CLIENT", "ID")
        pipeline.execute_command("CLIENT", "LIST")
        for link in LINKS:
            pipeline.execute_command("XLEN", keys.link(link.name))
        replies = await pipeline.execute(raise_on_error=False)
    except (exceptions.RedisError, OSError) as error:
        raise unreachable(config, server.explain(error)) from None
    finally:
        await redis.aclose()
    info, length, pending, consumers, epoch, results, own_id, clients, *links = replies
    for reply in (length, epoch, results, *links):
        if isinstance(reply, Exception):
            raise server.explain(reply)
    # These two fail while no pipeline has ever run here and made the group.
    in_flight = 0 if isinstance(pending, Exception) else int(pending["pending"])
    idle_ms = [] if isinstance(consumers, Exception) else [int(c[b"idle"]) for c in consumers]
    return BusStatus(
        url=server.name,
        server=_server_name(info),
        prefix=config.prefix,
        # What is answered is deleted, so the rest of the stream has not been taken.
        waiting=max(0, int(length) - in_flight),
        in_flight=in_flight,
        last_taken_s=min(idle_ms) / 1000 if idle_ms else None,
        epoch=int(epoch or 0),
        results=int(results),
        links={link.name: int(count) for link, count in zip(LINKS, links, strict=True)},
        connections=_connections(clients, own_id),
    )


def _server_name(info: Any) -> str:
    fields = _fields(info)
    for product, name in (("valkey_version", "Valkey"), ("redis_version", "Redis")):
        if product in fields:
            return f"{name} {fields[product]}"
    return "unknown"


def _fields(info: Any) -> dict[str, str]:
    """The reply of INFO, parsed or not."""
    if isinstance(info, Exception):
        return {}
    if isinstance(info, dict):
        return {_text(name): _text(value) for name, value in info.items()}
    lines = (line.partition(":") for line in _text(info).splitlines())
    return {name: value.strip() for name, _, value in lines}


def _connections(clients: Any, own_id: Any) -> dict[str, int]:
    """From CLIENT LIST, a line of `name=value` fields for each connection, all but our own."""
    if isinstance(clients, Exception):
        return {}
    names: Counter[str] = Counter()
    for line in _text(clients).splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        if fields.get("id") != str(own_id):
            names[fields.get("name", "")] += 1
    return dict(sorted(names.items()))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _table(found: BusStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("bus", f"{found.url}  ({found.server}, prefix {found.prefix})")
    table.add_row("pipeline", _verdict(found))
    table.add_row("requests", f"{found.waiting} waiting, {found.in_flight} in flight")
    busy = [f"{name} ≤ {count}" for name, count in found.links.items() if count]
    table.add_row("links", ", ".join(busy) if busy else "nothing waits")
    table.add_row("results", f"{found.results} kept in the shared stream")
    table.add_row("epoch", str(found.epoch))
    names = [
        f"{name} ({count})" if count > 1 else name
        for name, count in found.connections.items()
        if name
    ]
    unnamed = found.connections.get("", 0)
    if unnamed:
        names.append(f"{unnamed} connections without a name")
    table.add_row("connected", "\n".join(names) or "unknown")
    return table


def _verdict(found: BusStatus) -> str:
    """Whether somebody answers, as far as Redis can tell."""
    if found.last_taken_s is None:
        return "none has run here yet; start one with `nano-inference up`"
    if found.last_taken_s < _SILENT_AFTER_S:
        return f"running; asked for requests {found.last_taken_s:.1f} s ago"
    ago = f"last asked for requests {_duration(found.last_taken_s)} ago"
    if found.in_flight:
        return f"{ago}: busy with those in flight, or gone"
    return f"not running; {ago}"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
