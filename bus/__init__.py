"""Messages, and the bus that carries them, in memory or on Redis."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import BusConfig
    from .channel import Bus, Inbox, OutputStream
    from .entries import Malformed, RequestEntry
    from .memory.bus import MemoryBus
    from .replies import Outcome
    from .sender import Sender

_MODULES = {
    "Bus": "channel",
    "Inbox": "channel",
    "OutputStream": "channel",
    "Malformed": "entries",
    "RequestEntry": "entries",
    "MemoryBus": "memory.bus",
    "Outcome": "replies",
    "Sender": "sender",
}
"""Imported with their first use: messages alone need no bus."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def open_bus(
    config: BusConfig, local_stages: frozenset[str] = frozenset(), replicas: int = 1
) -> Bus:
    """Return the bus named by `config.url`, for a pipeline with `replicas` replicas.

    Needs a running event loop. On Redis it connects on first use; `ping` checks the connection.

    Args:
        config: The bus settings.
        local_stages: Roles of the stages in this process.
        replicas: Of the pipeline.

    Raises:
        BusError: The URL can't be used.
    """
    if config.url == "memory":
        from .memory.bus import MemoryBus

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
    "RequestEntry",
    "Sender",
    "open_bus",
]
