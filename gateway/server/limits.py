"""Limits of the gateway: connections, requests in flight, and the bytes of their bodies."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config import GatewayConfig, RequestError
from ...config.logger import get_logger
from .http import Respond, call_of, respond_plainly
from .measures import Reason

PROBES = frozenset(
    (
        *("/livez", "/healthz", "/readyz", "/progressz", "/health"),
        "/liveness",
        *("/v2/health/live", "/v2/health/ready"),
    )
)
"""Paths without limits; `/health` is SGLang's, those below `/v2` are KServe's."""

ACCEPTED_AT_ONCE = 64
"""asyncio accepts up to its backlog before it handles any of them, and each takes a file."""

_SPARE = 2
SPARE_CONNECTIONS = _SPARE * ACCEPTED_AT_ONCE
"""Connections beyond those with a request in flight, which are told that there is no room. Twice as
many as are accepted at once, or newcomers would be replaced before they could read that."""

# For Redis, models, logs, and connections that are accepted before others have closed.
_RESERVED_FILES = 256

UNCOUNTED_BYTES = 1 << 16
"""The first bytes of a body, which always have room, so that a small request never waits for large
ones. The server reads about as much of each before its application does."""


class ConnectionLimits(NamedTuple):
    """Limits for which the process has enough files.

    Attributes:
        requests: In flight, of HTTP and gRPC together.
        connections: Of each server.
        accepted_at_once: Connections accepted before any of them is handled.
    """

    requests: int
    connections: int
    accepted_at_once: int


def limits_for(config: GatewayConfig, max_files: int) -> ConnectionLimits:
    """Return the limits of a gateway that may open so many files.

    With gRPC, each of the two servers has half of the files, since neither counts the other's.
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
    """Return the limits of this process, and log if they are below the settings."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = limits_for(config, max_files)
    if found.requests < config.max_connections:
        get_logger().info("fewer_connections", most=found.requests, max_files=max_files)
    return found


class Overloaded(RequestError):
    """There is no room now."""

    code = "overloaded"


class HeldBytes:
    """The bytes that the body of a request in flight holds."""

    __slots__ = ("_limits", "_received", "counted")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._received = self.counted = 0

    def add(self, received: int) -> None:
        """Count more bytes. Raises Overloaded when there is no room for them."""
        self._received += received
        more = max(0, self._received - UNCOUNTED_BYTES) - self.counted
        self._limits.hold(more)
        self.counted += more


@dataclass(eq=False)
class RequestLimits:
    """ASGI: answers calls beyond the limits with 429, but for probes.

    The bytes of a body count from their arrival until its request is answered. They don't count
    when they are announced, or clients that announce large bodies would shut others out.

    Attributes:
        max_requests: The most requests in flight.
        max_bodies_bytes: The most bytes of all bodies in flight.
        respond: Returns the response to an error.
        refused: The number of refused calls by reason; the reader resets it.
        held_bytes: The bytes of all bodies in flight, without `UNCOUNTED_BYTES` of each.
    """

    app: ASGIApp
    max_requests: int
    max_bodies_bytes: int
    respond: Respond = respond_plainly
    refused: Counter[Reason] = field(default_factory=Counter)
    held_bytes: int = 0
    _in_flight: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        with ExitStack() as stack:
            try:
                size = int(length) if length.isdecimal() else 0
                held = stack.enter_context(self.entered(size))
            except Overloaded as refusal:
                await self.respond(call_of(scope), refusal)(scope, receive, send)
                return
            call_of(scope).hold = held.add

            async def receive_counted() -> Message:
                message = await receive()
                # The reader of the body answers with this exception.
                held.add(len(message.get("body", b"")))
                return message

            await self.app(scope, receive_counted, send)

    @contextmanager
    def entered(self, size: int = 0) -> Iterator[HeldBytes]:
        """Open while a request is in flight.

        Args:
            size: The announced size of its body.

        Raises:
            Overloaded: There are too many, or there is no room for the body.
        """
        if self._in_flight >= self.max_requests:
            raise self._refusal(
                f"{self.max_requests} requests are under way here, which is as many as the "
                "gateway takes (gateway.max_connections, and its limit of open files); try again",
                "too_many_requests",
            )
        # A body larger than the limit itself is refused by its reader, as too large.
        counted = max(0, size - UNCOUNTED_BYTES)
        if counted <= self.max_bodies_bytes:
            self._check_room(counted)
        held = HeldBytes(self)
        self._in_flight += 1
        try:
            yield held
        finally:
            self._in_flight -= 1
            self.held_bytes -= held.counted

    def hold(self, more_bytes: int) -> None:
        """Count bytes of a body. Raises Overloaded when there is no room for them."""
        if more_bytes:
            self._check_room(more_bytes)
        self.held_bytes += more_bytes

    def _check_room(self, more_bytes: int) -> None:
        if self.held_bytes + more_bytes > self.max_bodies_bytes:
            raise self._refusal(
                "the bodies of all requests together are larger than "
                f"{self.max_bodies_bytes} bytes (gateway.max_bodies_bytes); try again, or send "
                "less at a time",
                "too_many_bytes",
            )

    def _refusal(self, message: str, reason: Reason) -> Overloaded:
        self.refused[reason] += 1
        return Overloaded(message)
