"""The bus's contract on the simulated Redis server."""

from __future__ import annotations

import asyncio
import inspect
from types import ModuleType
from typing import Any

from ..bus import test_bus, test_leases, test_links, test_requests, test_results
from ..buses import Buses

_FIXTURES = {"bus", "buses"}
"""Fixtures of the contract's tests; tests for Redis alone also read the server itself."""


def _tests_of(module: ModuleType) -> dict[str, object]:
    """Return the tests of the contract in a module."""
    found = {}
    for name, test in vars(module).items():
        if name.startswith("test_") and inspect.isfunction(test):
            taken = set(inspect.signature(test).parameters)
            given = {
                each.strip()
                for mark in getattr(test, "pytestmark", ())
                if mark.name == "parametrize"
                for each in str(mark.args[0]).split(",")
            }
            if taken & _FIXTURES and taken - given <= _FIXTURES:
                found[f"{name}_in_{module.__name__.rpartition('_')[2]}"] = test
    return found


async def test_a_lane_starts_though_its_connection_breaks(buses: Buses, network: Any) -> None:
    """The layout of shards is read first."""
    bus = buses.open()
    starting = asyncio.create_task(bus.requests.pending())
    for _ in range(100):
        if network.num_open:
            break
        await asyncio.sleep(0)
    assert network.num_open == 1
    network.reset(None)
    assert await starting == []


for _module in (test_bus, test_leases, test_links, test_requests, test_results):
    globals().update(_tests_of(_module))
