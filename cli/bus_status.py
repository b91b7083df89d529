"""The status of a pipeline, read from Redis, which answers even if the pipeline does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ..bus.links import all_links
from ..config import BusConfig, BusError, Config, redact
from ..pipeline.health import lanes_of, reason_of, replicas_of, verdict
from ..pipeline.progress import progress_of
from ..pipeline.status import PipelineStatus
from ..store.redis.keys import Keys
from ..store.registry import ModelState
from .connection import connected, unreachable

_OWN_NAME = "status"


class BusStatus(PipelineStatus, frozen=True, kw_only=True):
    """The status of a pipeline, and of its Redis.

    Attributes:
        server: Name and version.
        prefix: First part of the keys.
        shards: Requests on each shard of the requests stream, taken or not.
        last_taken_s: Seconds since an admission last read requests; None if none ever did.
        results: Completions in the shared results streams.
        links: Messages on each link over Redis, at most: a reader removes what it has read a while
            later. Names are prefixed with the lane if that is not "0", and, in a deployment of
            several, the model.
        connections: Connections to the server, by client name; "" for those without.
    """

    server: str
    prefix: str
    shards: tuple[int, ...] = ()
    last_taken_s: float | None
    results: int
    links: dict[str, int]
    connections: dict[str, int]


async def bus_status(config: Config, model: str | None = None) -> BusStatus:
    """Read the status from Redis, in a few round trips per model.

    Args:
        config: The settings.
        model: One of several models, by one of its names; None for all.

    Raises:
        BusError: Redis can't be reached, or refuses a necessary command.
        RequestError: unknown_model.
    """
    stall_s = config.pipeline.stall_timeout_s
    async with connected(config) as client:
        records = {} if config.bus.model else await client.bus.store.models.read()
        chosen = None if model is None else await client.deployment.find(model)
    if not records:
        return await _read(config.bus, stall_s)
    states = {id: each.state for id, each in records.items() if chosen in (None, id)}
    each = [await _read(replace(config.bus, model=id), stall_s) for id in states]
    deployment = await _read(config.bus, stall_s) if chosen is None else None
    return _together(states, each, deployment)


def _together(
    states: dict[str, ModelState], each: Sequence[BusStatus], deployment: BusStatus | None
) -> BusStatus:
    """Merge the status of each model, and of the deployment's requests stream."""
    lanes = [lane for status in each for lane in status.lanes]
    reason = reason_of(states, lanes)
    taken = [status.last_taken_s for status in each if status.last_taken_s is not None]
    every = [*each, deployment] if deployment else list(each)
    return replace(
        every[-1],  # facts of the server are the same in all
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
        progress=progress_of(lanes, every[-1].stall_timeout_s),
    )


async def _read(config: BusConfig, stall_timeout_s: float) -> BusStatus:
    """Read the status of one model, or of a deployment's requests stream."""
    # Importing redis-py takes time.
    from ..bus.redis.bus import RedisBus

    bus = RedisBus(config)
    try:
        lanes = lanes_of(await bus.store.board.read())
        replicas = dict.fromkeys(await bus.lanes(), 1)
        replicas |= {lane.lane: 1 + replicas_of(lane.stages)[-1] for lane in lanes}
        links = [
            (name, link.name) for name in sorted(replicas) for link in all_links(replicas[name])
        ]
        backlog = await bus.requests.backlog()
        shards = await bus.requests.shard_lengths()
    except BusError as error:
        raise unreachable(config, error) from None
    finally:
        await bus.aclose()
    keys = Keys(config.prefix, config.lane, config.model)
    each = [keys.of_shard(shard) for shard in range(len(shards))]
    streams = [shard.results for shard in each]
    streams += [keys.link(name, lane) for lane, name in links]
    server, clients, replies = await _replies(
        config,
        len(each),
        *(("XINFO", "CONSUMERS", shard.requests, config.group) for shard in each),
        *(("XLEN", key) for key in streams),
    )
    groups, results, lengths = (
        replies[: len(each)],
        replies[len(each) : 2 * len(each)],
        replies[2 * len(each) :],
    )
    # They fail until a pipeline has created the group.
    found = [group for group in groups if not isinstance(group, Exception)]
    idle_ms = [int(consumer[b"idle"]) for group in found for consumer in group]
    reason = verdict(lanes)
    return BusStatus(
        ready=not reason,
        reason=reason,
        url=redact(config.url),
        server=server,
        prefix=config.prefix,
        shards=tuple(shards),
        waiting=backlog.waiting,
        in_flight=backlog.pending,
        queue_length=backlog.queue_length,
        dead_letters=backlog.dead,
        last_taken_s=min(idle_ms) / 1000 if idle_ms else None,
        results=sum(results),
        lanes=lanes,
        links={
            name if lane == "0" else f"{lane}:{name}": length
            for (lane, name), length in zip(links, lengths, strict=True)
        },
        stall_timeout_s=stall_timeout_s,
        progress=progress_of(lanes, stall_timeout_s),
        connections=clients,
    )


async def _replies(
    config: BusConfig, may_fail: int, *commands: tuple[Any, ...]
) -> tuple[str, dict[str, int], list[Any]]:
    """Return the server's name, its connections by client name, and the replies.

    The first `may_fail` replies may be errors.
    """
    from redis import exceptions

    from ..store.redis.client import Server, execute_all, on_each

    server = Server(config.url, _OWN_NAME)
    redis = server.client(1)
    info: dict[str, Any] = {}
    names: Counter[str] = Counter()
    try:
        replies = await execute_all(redis, commands, raise_on_error=False)
        try:
            info, *_ = await on_each(redis, "INFO", "server")
            # As one word, redis-py parses the reply.
            for clients in await on_each(redis, "CLIENT LIST"):
                names.update(fields.get("name", "") for fields in clients)
        except exceptions.ResponseError:
            pass  # forbidden to this user
    except (exceptions.RedisError, OSError) as error:
        raise unreachable(config, server.explain(error)) from None
    finally:
        await redis.aclose()
        await server.aclose()
    for reply in replies[may_fail:]:
        if isinstance(reply, Exception):
            raise server.explain(reply)
    del names[_OWN_NAME]
    versions = [
        f"{name} {info[key]}"
        for key, name in (("valkey_version", "Valkey"), ("redis_version", "Redis"))
        if key in info
    ]
    return [*versions, "unknown"][0], dict(sorted(names.items())), replies
