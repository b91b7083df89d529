"""The Redis server dies, forgets, idles or fails over: every stream ends, whole."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from nano_inference import BusClient, Pipeline
from nano_inference.bus.public import Output
from nano_inference.config import Config, load_config
from nano_inference.store.redis.keys import Keys

from ..rig import mortal_server
from ..servers import SLOTS, Cluster, Node, Sentinels, cluster, sentinel_group, until
from ..soaking import in_soak
from . import short_model
from .builders import MORE_TOKENS, check_stream, stream_request

INDICES = range(0, 32, 4)  # the streamed requests


def config_on(url: str) -> Config:
    """Every link on this server, on keys of its own, and the short model."""
    overrides = {
        "engine.dtype": "float32",
        "engine.model_path": str(short_model.folder()),
        "bus.url": url,
        "bus.prefix": f"test-{uuid.uuid4().hex[:12]}",
        "bus.links": "redis",
    }
    return load_config(env={}, overrides=overrides)


async def survive(client: BusClient, trouble: Callable[[], Awaitable[None]]) -> None:
    """Eight streams, and `trouble` when all have begun: all of them end, whole."""
    begun = asyncio.Barrier(len(INDICES) + 1)

    async def follow(index: int) -> list[Output]:
        outputs: list[Output] = []
        request = {**stream_request(index, MORE_TOKENS), "request_id": f"r{index}"}
        async for output in client.submit(request):
            outputs.append(output)
            if len(outputs) == 3:
                await begun.wait()
        return outputs

    async with asyncio.TaskGroup() as group:
        following = [group.create_task(follow(index)) for index in INDICES]
        await begun.wait()
        await trouble()
    for index, task in zip(INDICES, following, strict=True):
        check_stream(index, task.result(), MORE_TOKENS, short_model.folder())


# --- one server ------------------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Any]:
    async with mortal_server(tmp_path / "data") as running:
        yield running


@pytest.mark.parametrize(
    "last_bytes",
    [in_soak(0), 3000, in_soak(None)],
    ids=["nothing-lost", "the-end-lost", "all-lost"],
)
async def test_every_stream_survives_the_server(server: Any, last_bytes: int | None) -> None:
    """With its log, with a log of which the end is missing (`everysec`), and with none."""
    config = config_on(server.url)
    async with Pipeline(config), BusClient.connect(config.bus) as client:

        async def trouble() -> None:
            server.kill()
            if last_bytes != 0:
                server.forget(last_bytes)
            await server.start()

        await survive(client, trouble)
        assert (await client.complete(stream_request(99))).status == "done"
        await check_foreign(server.port, config.bus.prefix)


async def check_foreign(port: int, prefix: str) -> None:
    """Check that a late reader finds each stream whole, without a gap."""
    async with Redis(port=port, decode_responses=True) as plain:
        for index in INDICES:
            entries = await plain.xrange(f"{prefix}:out:r{index}")
            numbers = [int(entry_id.partition("-")[2]) for entry_id, _ in entries]
            assert numbers == list(range(1, len(entries) + 1))
            outputs = [json.loads(fields["json"]) for _, fields in entries]
            offsets = [output["token_offset"] for output in outputs[:-1]]
            assert offsets == list(range(len(outputs) - 1))
            assert outputs[-1]["status"] == "done"


async def test_requests_wait_while_there_is_no_server(server: Any) -> None:
    """Started without a server, the stages wait for it and then work."""
    config = config_on(server.url)
    server.kill()
    starting = asyncio.create_task(Pipeline(config, wait_for_bus=True).__aenter__())
    done, _ = await asyncio.wait({starting}, timeout=1.0)
    assert not done
    await server.start()
    pipeline = await starting
    try:
        completion = await pipeline.complete(stream_request(1))
        assert completion.status == "done"
    finally:
        await pipeline.__aexit__(None, None, None)


# --- failover --------------------------------------------------------------------------------


@pytest.fixture
async def group(tmp_path: Path, pytestconfig: pytest.Config) -> AsyncIterator[Sentinels]:
    program = pytestconfig.getoption("--redis-server") or ""
    async with sentinel_group(tmp_path / "sentinels", program) as running:
        yield running


@pytest.fixture
async def nodes(tmp_path: Path, pytestconfig: pytest.Config) -> AsyncIterator[Cluster]:
    program = pytestconfig.getoption("--redis-server") or ""
    async with cluster(tmp_path / "cluster", program, replicas=True) as running:
        yield running


async def last_of(holder: Callable[[str], Node], key: str) -> dict[str, object]:
    """Return the last entry of a stream."""
    entries = await holder(key).plain.xrevrange(key, count=1)
    return json.loads(entries[0][1]["json"]) if entries else {}


async def check_stored(holder: Callable[[str], Node], prefix: str) -> None:
    """Check that a late reader finds each stream whole, once, and each end in the results.

    A master that lives on takes some ends with it, and the pipeline writes them again."""
    shared = f"{prefix}:results"

    async def ended() -> bool:
        told = await holder(shared).plain.xrange(shared)
        ids = {json.loads(fields["json"])["request_id"] for _, fields in told}
        lasts = [await last_of(holder, f"{prefix}:out:r{index}") for index in INDICES]
        return {f"r{index}" for index in INDICES} <= ids and all("status" in each for each in lasts)

    await until(ended, "the ends that were lost")
    for index in INDICES:
        key = f"{prefix}:out:r{index}"
        entries = await holder(key).plain.xrange(key)
        numbers = [int(entry_id.partition("-")[2]) for entry_id, _ in entries]
        assert numbers == list(range(1, len(entries) + 1))
        outputs = [json.loads(fields["json"]) for _, fields in entries]
        assert [output["token_offset"] for output in outputs[:-1]] == [*range(len(outputs) - 1)]
        assert outputs[-1]["status"] == "done"
    told = [json.loads(fields["json"]) for _, fields in await holder(shared).plain.xrange(shared)]
    ids = [each["request_id"] for each in told if each["request_id"].startswith("r")]
    assert sorted(ids) == sorted(f"r{index}" for index in INDICES), "each once"


async def test_every_stream_survives_a_failover_by_sentinel(group: Sentinels) -> None:
    config = config_on(group.url)
    old = await group.master()

    async def trouble() -> None:
        old.kill()

    async with Pipeline(config), BusClient.connect(config.bus) as client:
        await survive(client, trouble)
        new = await group.master()
        assert new is not old
        for index in (98, 99):
            assert (await client.complete(stream_request(index))).status == "done"
        await check_stored(lambda key: new, config.bus.prefix)
        # The old one comes back, first as a master with old data and then as a replica.
        await old.start()
        await until(lambda: is_replica(old), "the old master's new role")
        group.sentinels[0].kill()  # the other ones answer as well
        async with BusClient.connect(config.bus) as late:
            assert (await late.complete(stream_request(97))).status == "done"


async def is_replica(node: Node) -> bool:
    info = await node.plain.info("replication")
    return info["role"] == "slave" and info["master_link_status"] == "up"


@pytest.mark.soak(only=True)
async def test_every_stream_survives_a_failover_in_a_cluster(nodes: Cluster) -> None:
    """The master that goes holds the requests stream, and with it the leases."""
    config = config_on(nodes.url)

    def place_of(key: bytes) -> int:
        return next(i for i in range(3) if key_slot(key) < (i + 1) * SLOTS // 3)

    place = place_of(Keys(config.bus.prefix).requests)

    def holder(key: str) -> Node:
        which = place_of(key.encode())
        return (nodes.replicas if which == place else nodes.masters)[which]

    async def trouble() -> None:
        nodes.masters[place].kill()

    async with Pipeline(config), BusClient.connect(config.bus) as client:
        await survive(client, trouble)
        # Streams need other masters only: they may have ended before.
        await until(lambda: nodes.has_failed_over(place), "the failover")
        for index in (98, 99):
            assert (await client.complete(stream_request(index))).status == "done"
        await check_stored(holder, config.bus.prefix)
