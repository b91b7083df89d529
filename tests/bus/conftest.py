"""Fixtures of buses, in memory and on Redis."""

from ..buses import (  # noqa: F401
    bus,
    buses,
    foreign,
    memory_bus,
    pytest_generate_tests,
    pytest_itemcollected,
    redis_buses,
)
