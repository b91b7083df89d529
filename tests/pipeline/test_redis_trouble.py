"""The pipeline while its server dies, forgets, or idles: every stream ends, whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference import BusClient, Pipeline

from ..rig import mortal_server
from .test_life import stream_request
from .trouble import INDICES, config_on, survive

LIMIT_S = 90
IDLE_S = 4.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Any]:
    async with mortal_server(tmp_path / "data") as running:
        yield running


@pytest.mark.parametrize(
    "last_bytes", [0, 3000, None], ids=["nothing-lost", "the-end-lost", "all-lost"]
)
async def test_every_stream_survives_the_server(server: Any, last_bytes: int | None) -> None:
    """With its log, with a log of which the end is missing (`everysec`), and with none."""
    config = config_on(server.url)
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(config),
        BusClient.connect(config.bus) as client,
    ):

        async def trouble() -> None:
            server.kill()
            if last_bytes != 0:
                server.forget(last_bytes)
            await server.start()

        await survive(client, trouble)
        assert (await client.complete(stream_request(99))).status == "done"
        await check_foreign(server.port, config.bus.prefix)


async def check_foreign(port: int, prefix: str) -> None:
    """What a client finds who reads the streams only now: all of it, without a gap."""
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
    async with asyncio.timeout(LIMIT_S):
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


async def test_an_idle_pipeline_costs_the_server_little(server: Any) -> None:
    config = config_on(server.url)
    async with asyncio.timeout(LIMIT_S), Pipeline(config), Redis(port=server.port) as plain:

        async def commands() -> int:
            stats = await plain.info("commandstats")
            return sum(int(each["calls"]) for each in stats.values())

        before = await commands()
        await asyncio.sleep(IDLE_S)  # not to wait for anything: this is what is measured
        per_s = (await commands() - before) / IDLE_S
        assert per_s < 20
