"""The connection of a command to a pipeline in other processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio.to_thread

from ..config import DEFAULT_URL, BusConfig, BusError, Config, RequestError, shown
from ..pipeline.client import BusClient
from ..pipeline.models import ModelStatus
from ..store.registry import find_model
from ..telemetry import Metrics, setup_metrics, setup_tracing
from .options import Options

T = TypeVar("T")


@asynccontextmanager
async def connected(
    config: Config, *, name: str = "client", wait_for_bus: bool = False, with_metrics: bool = False
) -> AsyncIterator[BusClient]:
    """A client of the pipeline at `config.bus`, with tracing as configured.

    Args:
        config: The settings.
        name: What this process is, to tell it from others in traces and metrics.
        wait_for_bus: Start although the bus can't be reached, and work once it can.
        with_metrics: Whether this process shows metrics, on a port or as a gateway, as configured.

    Raises:
        BusError: The bus can't be reached.
        ConfigError: The port for the metrics is taken.
    """
    instance = f"{name}-{os.getpid()}"
    metrics = Metrics()
    if with_metrics:
        metrics = setup_metrics(config.telemetry, instance, without_port=config.gateway.metrics)
    tracing = setup_tracing(config.telemetry, instance)
    client = BusClient.connect(config.bus, tracing, metrics)
    try:
        try:
            if not wait_for_bus:
                await client.bus.ping()
        except BusError as error:
            raise unreachable(config.bus, error) from None
        yield client
    finally:
        await client.aclose()
        tracing.shutdown()
        await anyio.to_thread.run_sync(metrics.shutdown)


@asynccontextmanager
async def connected_to(config: Config, model: str | None) -> AsyncIterator[BusClient]:
    """As `connected`, of a deployment of several models to the one with this name, if one is given.

    Raises:
        BusError: As `connected`.
        RequestError: unknown_model.
    """
    async with connected(config) as client:
        if model is None:
            yield client
            return
        found = await find_served(client, model)
        if found == client.bus.model:
            yield client
            return
        async with client.of_model(found) as of_model:
            yield of_model


def operate(operation: Callable[[BusClient], Awaitable[T]], options: Options) -> T:
    """Does something by a client of the model that the options name, and gives what it returns.

    Raises:
        NanoInferenceError: As `connected_to`, or the operation.
    """
    config = options.client_config()

    async def run() -> T:
        async with connected_to(config, options.served) as client:
            return await operation(client)

    return asyncio.run(run())


async def find_served(client: BusClient, name: str) -> str:
    """The id of the model with this name; "" for the only one.

    Raises:
        RequestError: unknown_model.
    """
    if records := await client.bus.store.models.read():
        return find_model(name, records.values()).id
    # There is one, which nobody has to name.
    known = sorted({name for status in await client.models() for name in served_names(status)})
    if known and name not in known:
        raise RequestError(
            f"there is no model {shown(name)} here; known: {', '.join(known)}", code="unknown_model"
        )
    return ""


def served_names(status: ModelStatus) -> tuple[str, ...]:
    """All names by which a model is asked for."""
    return (status.id, *status.aliases, *status.adapters)


def unreachable(bus: BusConfig, error: BusError) -> BusError:
    """Says it in the words of someone who has not started anything yet, where that is likely."""
    if bus.url != DEFAULT_URL:
        return error
    return BusError(
        f"no pipeline at {DEFAULT_URL}; start one with `nano-inference up`, or give the URL of "
        f"another with --bus"
    )
