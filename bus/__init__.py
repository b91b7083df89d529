"""Messages, and the bus that carries them: in memory or on Redis, behind one contract."""

from __future__ import annotations

from ..config import BusConfig
from .channel import (
    Bus,
    Inbox,
    Malformed,
    OutputStream,
    RequestEntry,
    RequestQueue,
    ResultStreams,
    Sender,
)
from .memory.bus import MemoryBus
from .replies import Outcome, Replies


def open_bus(
    config: BusConfig, local_stages: frozenset[str] = frozenset(), replicas: int = 1
) -> Bus:
    """The bus that `config.url` names, for a pipeline with so many replicas.

    `local_stages`: the roles of the stages that run in this process.

    Call it with an event loop running. On Redis it connects on first use; `ping` tells whether
    it can.

    Raises:
        BusError: The URL can't be used.
    """
    if config.url == "memory":
        return MemoryBus(config)
    from .redis.bus import RedisBus  # only here, so that the memory bus needs no Redis client

    return RedisBus(config, local_stages, replicas)


__all__ = [
    "Bus",
    "Inbox",
    "Malformed",
    "MemoryBus",
    "Outcome",
    "OutputStream",
    "Replies",
    "RequestEntry",
    "RequestQueue",
    "ResultStreams",
    "Sender",
    "open_bus",
]
