"""Messages, and the bus that carries them, in memory or on Redis.

Names are loaded on first use, so that a core which needs messages loads no transport.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import BusConfig
    from .channel import Bus as Bus
    from .channel import Inbox as Inbox
    from .channel import OutputStream as OutputStream
    from .entries import Malformed as Malformed
    from .entries import RequestEntry as RequestEntry
    from .memory.bus import MemoryBus as MemoryBus
    from .replies import Outcome as Outcome
    from .sender import Sender as Sender

_HOME = {
    "Bus": ".channel",
    "Inbox": ".channel",
    "Malformed": ".entries",
    "MemoryBus": ".memory.bus",
    "Outcome": ".replies",
    "OutputStream": ".channel",
    "RequestEntry": ".entries",
    "Sender": ".sender",
}

__all__ = [*_HOME, "open_bus"]


def open_bus(
    config: BusConfig, local_stages: frozenset[str] = frozenset(), replicas: int = 1
) -> Bus:
    """Return the bus named by `config.url`, for a pipeline with `replicas` replicas.

    Needs a running event loop. On Redis it connects on first use; `ping` checks the connection.

    Args:
        config: The bus settings.
        local_stages: Roles of the stages in this process.
        replicas: Replicas of the pipeline.

    Raises:
        BusError: The URL can't be used.
    """
    if config.url == "memory":
        from .memory.bus import MemoryBus

        return MemoryBus(config)
    from .redis.bus import RedisBus  # only here, so that the memory bus needs no Redis client

    return RedisBus(config, local_stages, replicas)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
