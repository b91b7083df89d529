"""How many connections HTTP and gRPC may have together, so that files are left for all else."""

from __future__ import annotations

import resource
from typing import NamedTuple

from ...config import GatewayConfig
from ...config.logger import get_logger

ACCEPTED_AT_ONCE = 64
"""asyncio accepts up to its backlog before it looks at any of them, and each takes a file."""

_SPARE = 2
SPARE_CONNECTIONS = _SPARE * ACCEPTED_AT_ONCE
"""How many there may be beyond those with a request under way: on these the others are told that
there is no room. Twice as many as are accepted at once, or newcomers would be replaced by those
behind them before anybody has read what they sent."""

# For Redis, models and logs, and for connections that are accepted before others have gone.
_RESERVED_FILES = 256


class ConnectionLimits(NamedTuple):
    """Limits that the process's files have room for.

    Attributes:
        requests: Under way at a time, of both servers together.
        connections: Of each server.
        accepted_at_once: Connections that are accepted before any of them is looked at.
    """

    requests: int
    connections: int
    accepted_at_once: int


def limits_for(config: GatewayConfig, max_files: int) -> ConnectionLimits:
    """The limits of a gateway that may have so many files open.

    Where gRPC listens too, each of the two servers has half of the files: neither sees what the
    other has open.
    """
    if max_files == resource.RLIM_INFINITY:
        wanted = config.max_connections
        return ConnectionLimits(wanted, wanted + SPARE_CONNECTIONS, ACCEPTED_AT_ONCE)
    servers = 1 if config.grpc_port is None else 2
    files = (max_files - min(_RESERVED_FILES, max_files * 3 // 8)) // servers
    at_once = max(1, min(ACCEPTED_AT_ONCE, max_files // 16))
    spare = _SPARE * at_once
    requests = max(1, min(config.max_connections, files - spare))
    return ConnectionLimits(requests, requests + spare, at_once)


def limits_here(config: GatewayConfig) -> ConnectionLimits:
    """The limits in this process; the log says where they are lower than the settings."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = limits_for(config, max_files)
    if found.requests < config.max_connections:
        log = get_logger()
        log.info("fewer_connections", most=found.requests, max_files=max_files)
    return found
