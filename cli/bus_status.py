"""The status of a pipeline, read from Redis, which answers even if the pipeline does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import asdict, replace

from ..bus.links import all_links
from ..config import BusConfig, Config, redact
from ..pipeline.health import replicas_of
from ..pipeline.status import PipelineStatus, of_models, pipeline_status
from ..store.redis.keys import Keys
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
    bus = config.bus
    async with connected(config, model) as client:
        found = await pipeline_status(client, config.pipeline.stall_timeout_s, for_operator=True)
        shards = tuple(await client.bus.requests.shard_lengths())
        if client.bus.model and found.models:
            found = of_models(found, [client.bus.model])
    every = [Keys(bus.prefix, bus.lane, id) for id in found.models or [bus.model]]
    read = [keys.of_shard(shard) for keys in every for shard in range(len(shards))]
    links = _links(bus, found)
    server, clients, replies = await _replies(
        bus,
        len(read),
        *(("XINFO", "CONSUMERS", keys.requests, bus.group) for keys in read),
        *(("XLEN", keys.results) for keys in read[: len(shards)]),  # all models share them
        *(("XLEN", key) for key in links.values()),
    )
    # They fail until a pipeline has created the group.
    groups = [group for group in replies[: len(read)] if not isinstance(group, Exception)]
    idle_ms = [int(consumer[b"idle"]) for group in groups for consumer in group]
    return BusStatus(
        **asdict(replace(found, url=redact(bus.url))),
        server=server,
        prefix=bus.prefix,
        shards=shards,
        last_taken_s=min(idle_ms) / 1000 if idle_ms else None,
        results=sum(replies[len(read) : len(read) + len(shards)]),
        links=dict(zip(links, replies[len(read) + len(shards) :], strict=True)),
        connections=clients,
    )


def _links(bus: BusConfig, found: PipelineStatus) -> dict[str, bytes]:
    """Return the keys of the links of each lane by the name that is shown."""
    replicas = {(model, bus.lane): 1 for model in found.models or [bus.model]}
    replicas |= {(lane.model, lane.lane): 1 + replicas_of(lane.stages)[-1] for lane in found.lanes}
    return {
        ":".join(
            [*([model] if found.models else []), *([lane] if lane != "0" else []), link.name]
        ): Keys(bus.prefix, bus.lane, model).link(link.name, lane)
        for (model, lane), number in sorted(replicas.items())
        for link in all_links(number)
    }


async def _replies(
    config: BusConfig, may_fail: int, *commands: tuple[Any, ...]
) -> tuple[str, dict[str, int], list[Any]]:
    """Return the server's name, its connections by client name, and the replies.

    The first `may_fail` replies may be errors.
    """
    from redis import exceptions

    from ..store.redis.client import Server, execute_all, on_each

    server = Server(config.url, _OWN_NAME)
    redis = server.client()
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
