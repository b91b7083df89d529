"""The connection of a command to a pipeline in other processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread

from ..config import DEFAULT_URL, BusConfig, BusError, Config
from ..pipeline.client import BusClient
from ..telemetry import Metrics, setup_metrics, setup_tracing


@asynccontextmanager
async def connected(
    config: Config, *, name: str = "client", wait_for_bus: bool = False, with_metrics: bool = False
) -> AsyncIterator[BusClient]:
    """A client of the pipeline at `config.bus`, with tracing as configured.

    Args:
        config: The settings.
        name: What this process is, to tell it from others in traces and metrics.
        wait_for_bus: Start although the bus can't be reached, and work once it can.
        with_metrics: Whether this process shows metrics on a port, as configured.

    Raises:
        BusError: The bus can't be reached.
        ConfigError: The port for the metrics is taken.
    """
    instance = f"{name}-{os.getpid()}"
    metrics = setup_metrics(config.telemetry, instance) if with_metrics else Metrics()
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


def unreachable(bus: BusConfig, error: BusError) -> BusError:
    """Says it in the words of someone who has not started anything yet, where that is likely."""
    if bus.url != DEFAULT_URL:
        return error
    return BusError(
        f"no pipeline at {DEFAULT_URL}; start one with `nano-inference up`, or give the URL of "
        f"another with --bus"
    )
