"""Fixtures of buses, in memory and on Redis."""

from ..buses import (  # noqa: F401
    bus,
    buses,
    foreign,
    kit,
    memory_bus,
    pytest_generate_tests,
    redis_buses,
)
