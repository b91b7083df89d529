"""Deployments of several models in one process: a lane of each, and a router."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from nano_inference import BusClient, Config, Pipeline
from nano_inference.config import BusConfig, ModelConfig, load_config
from nano_inference.pipeline.router import Router
from nano_inference.store.registry import ModelRecord
from nano_inference.telemetry import Metrics

from . import short_model

LIMIT_S = 90


async def eventually(holds: Callable[[], Awaitable[Any]]) -> Any:
    """The first answer that is true."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := await holds()):  # noqa: ASYNC110  (as `until`)
            await asyncio.sleep(0.01)
        return found


def own_prefix(url: str) -> BusConfig:
    """A deployment of its own on a server."""
    return BusConfig(url=url, prefix=f"test-{uuid.uuid4().hex[:12]}")


@asynccontextmanager
async def routing(config: BusConfig, metrics: Metrics | None = None) -> AsyncIterator[BusClient]:
    """A client of the deployment, with a router at work."""
    async with BusClient.connect(config) as client, BusClient.connect(config) as of_router:
        router = asyncio.create_task(Router(of_router.bus, metrics).run_forever())
        try:
            async with asyncio.timeout(LIMIT_S):
                yield client
        finally:
            router.cancel()
            with suppress(asyncio.CancelledError):
                await router


async def put(client: BusClient, *specs: ModelConfig, takes: bool = True) -> None:
    for spec in specs:
        state: Any = "ready" if takes else "unloaded"
        await client.bus.store.models.put(ModelRecord(spec=spec, state=state, takes_requests=takes))


def model(name: str, **settings: Any) -> ModelConfig:
    return ModelConfig(id=name, path=str(short_model.folder()), **settings)


def lane_of(config: BusConfig, spec: ModelConfig) -> Config:
    shared = load_config(
        env={},
        overrides={"bus.url": config.url, "bus.prefix": config.prefix, "engine.dtype": "float32"},
    )
    return shared.of_model(spec)


@asynccontextmanager
async def serving(config: BusConfig, *specs: ModelConfig) -> AsyncIterator[BusClient]:
    """A router, and a lane of each model in this process."""
    async with routing(config) as client:
        await put(client, *specs)
        async with asyncio.TaskGroup() as group:
            lanes = [
                group.create_task(Pipeline(lane_of(config, spec)).__aenter__()) for spec in specs
            ]
        try:
            yield client
        finally:
            for lane in lanes:
                await lane.result().__aexit__(None, None, None)
