"""How much the gateway takes at a time: requests under way, and the bytes of their bodies."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config import GatewayConfig, RequestError
from ...config.logger import get_logger
from ..serving.measures import Reason
from .http import Respond, respond_plainly

PROBES = frozenset(
    ("/livez", "/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready")
)
"""Paths that no limit on calls concerns; `/health` is SGLang's, those below `/v2` are KServe's."""

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


UNCOUNTED_BYTES = 1 << 16
"""The beginning of a body, which is taken whatever the others hold: a small request never waits for
large ones. The server reads about as much of each before anybody asks for it."""

_HELD = "held_bytes"


class Overloaded(RequestError):
    """There is no room now; `reason` says for what."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, code="overloaded")
        self.reason: Reason = reason


class HeldBytes:
    """What the body of a request under way holds."""

    __slots__ = ("_limits", "_received", "counted")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._received = self.counted = 0

    def add(self, received: int) -> None:
        """So many bytes more have come. Raises Overloaded when there is no room for them."""
        self._received += received
        more = max(0, self._received - UNCOUNTED_BYTES) - self.counted
        self._limits.hold(more)
        self.counted += more


def hold(scope: Scope, more_bytes: int) -> None:
    """Counts what is made of a request's body, beside the body itself, until it is answered.

    Raises:
        Overloaded: There is no room for it.
    """
    held: HeldBytes | None = scope.get("state", {}).get(_HELD)
    if held is not None:
        held.add(more_bytes)


class RequestLimits:
    """ASGI: answers what is beyond the limits with 429 instead of passing it on, but for probes.

    The bytes of a body count from when they come until its request is answered, since what is made
    of them is kept as long. They do not count before they come, or those who announce large bodies
    and send nothing would shut others out.

    Attributes:
        max_requests: How many there may be.
        refused: How many were refused, and why, since somebody emptied this.
        held_bytes: What the bodies of all that are under way hold, beyond the uncounted.
        respond: Answers an error as clients of what is called read it.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_requests: int,
        max_bodies_bytes: int,
        respond: Respond = respond_plainly,
    ) -> None:
        self.refused: Counter[Reason] = Counter()
        self.respond = respond
        self._app = app
        self.max_requests = max_requests
        self._max_bodies_bytes = max_bodies_bytes
        self._under_way = 0
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        try:
            self._check(int(told) if told.isdecimal() else 0)
        except Overloaded as refusal:
            await self.respond(scope, refusal)(scope, receive, send)
            return
        with self._entered() as held:
            scope.setdefault("state", {})[_HELD] = held

            async def receive_counted() -> Message:
                message = await receive()
                # Whoever reads the body answers with what this raises.
                held.add(len(message.get("body", b"")))
                return message

            await self._app(scope, receive_counted, send)

    @contextmanager
    def entered(self) -> Iterator[HeldBytes]:
        """Open while a request is under way that came by another way.

        Raises:
            Overloaded: There are too many.
        """
        self._check(0)
        with self._entered() as held:
            yield held

    def hold(self, more_bytes: int) -> None:
        """Counts what a body holds. Raises Overloaded when there is no room for it."""
        if more_bytes and self.held_bytes + more_bytes > self._max_bodies_bytes:
            raise self._no_room()
        self.held_bytes += more_bytes

    @contextmanager
    def _entered(self) -> Iterator[HeldBytes]:
        held = HeldBytes(self)
        self._under_way += 1
        try:
            yield held
        finally:
            self._under_way -= 1
            self.held_bytes -= held.counted

    def _check(self, size: int) -> None:
        """Raises Overloaded when there is no room for a request whose body has so many bytes."""
        if self._under_way >= self.max_requests:
            raise self._refusal(
                f"{self.max_requests} requests are under way here, which is as many as the "
                "gateway takes (gateway.max_connections, and its limit of open files); try again",
                "too_many_requests",
            )
        # What is larger than all of it is refused by its reader, as too large.
        counted = max(0, size - UNCOUNTED_BYTES)
        if counted <= self._max_bodies_bytes < self.held_bytes + counted:
            raise self._no_room()

    def _no_room(self) -> Overloaded:
        return self._refusal(
            f"the bodies of all requests together are larger than {self._max_bodies_bytes} bytes "
            "(gateway.max_bodies_bytes); try again, or send less at a time",
            "too_many_bytes",
        )

    def _refusal(self, message: str, reason: Reason) -> Overloaded:
        self.refused[reason] += 1
        return Overloaded(message, reason)
