"""Buses on the simulated server, in real time and without delays."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from nano_inference.bus import Bus
from nano_inference.bus.redis import bus as redis_bus

from ..buses import Buses, pytest_itemcollected  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """Stories unfreeze what the worker has imported; each full collection of a later test, such as
    those of memory, would visit all of it."""
    yield
    gc.collect()
    gc.freeze()


@pytest_asyncio.fixture
async def network() -> Any:
    """The server, and the connections to it."""
    from .redis.network import Network

    loop, epoch_ns = asyncio.get_running_loop(), time.time_ns() - time.monotonic_ns()
    made = Network(loop, time.monotonic_ns, Random(1), epoch_ns)
    made.is_instant = True
    return made


@pytest_asyncio.fixture
async def buses(network: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Buses]:
    from .redis.client import SimulatedServer

    given = network

    class Server(SimulatedServer):
        network = given

    monkeypatch.setattr(redis_bus, "Server", Server)
    before: Any = asyncio.all_tasks()
    made = Buses("redis", "redis://simulated:6379")
    yield made
    await made.aclose()
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not leaked, f"tasks outlived their bus: {leaked}"


@pytest_asyncio.fixture
async def bus(buses: Buses) -> Bus:
    return buses.open()
