"""One look at a pipeline from outside, in Redis, which answers when the pipeline does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ..bus.links import all_links
from ..config import BusConfig, BusError, Config, redact
from ..pipeline.health import lanes_of, reason_of, replicas_of, verdict
from ..pipeline.status import PipelineStatus
from ..store.redis.keys import Keys
from ..store.registry import ModelState
from .connection import connected, find_served, unreachable

_OWN_NAME = "status"


class BusStatus(PipelineStatus, frozen=True, kw_only=True):
    """What one look at Redis showed, beyond what every look shows.

    Attributes:
        server: Name and version.
        prefix: First part of the keys.
        last_taken_s: Seconds since an admission last asked for requests; None when none ever did.
        results: Completions in the shared results stream.
        links: Messages that wait on each link that is carried over Redis, at most: a reader removes
            what it has read a while later. Of lanes other than "0" the link's name follows the
            lane's and a colon; of several models it begins with the model's and a colon.
        connections: Connections to the server, by client name; "" for those without.
    """

    server: str
    prefix: str
    last_taken_s: float | None
    results: int
    links: dict[str, int]
    connections: dict[str, int]


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
            records = {} if config.bus.model else await client.bus.store.models.read()
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
    lanes = [lane for status in each for lane in status.lanes]
    reason = reason_of(states, lanes)
    taken = [status.last_taken_s for status in each if status.last_taken_s is not None]
    every = [*each, entrance] if entrance else list(each)
    return replace(
        every[-1],  # of the server all say the same
        ready=not reason,
        reason=reason,
        waiting=sum(status.waiting for status in every),
        in_flight=sum(status.in_flight for status in each),
        queue_length=sum(status.queue_length for status in every),
        last_taken_s=min(taken, default=None),
        lanes=lanes,
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
        lanes = lanes_of(await bus.store.board.read())
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

    from ..store.redis.client import Server, execute_all, on_each

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
