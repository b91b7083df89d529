"""Streams that are under way when something happens to their server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from nano_inference import BusClient
from nano_inference.bus.public import Output
from nano_inference.config import Config, load_config

from . import short_model
from .test_life import MORE_TOKENS, check_stream, stream_request

INDICES = range(0, 32, 4)  # those that stream


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
