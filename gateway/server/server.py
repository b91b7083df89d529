"""The HTTP server that runs the application."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.routing import Route
from starlette.types import ASGIApp

from ...config import GatewayConfig
from .callers import only_known_callers
from .calls import ObservedCalls, OnCall
from .connections import LINGER_S, Connection, Connections
from .http import DEFAULT_RETRY_S, EngineError, Respond, respond_plainly
from .limits import RequestLimits, limits_here
from .measures import Measures
from .tls import Certificates, Handshake
from .websocket import SocketCalls

BACKLOG = 2048
"""Connections that may wait in the kernel."""

LEAVE_S = 5.0
"""Time for calls in flight when the server stops; the others get an error."""

# In uvicorn's ticks, ten a second.
_SWEEP_EVERY = 10
# `Connections` enforces it.
_NEVER_S = 10**9
# asyncio's message for each connection that it can't accept.
_NO_FILES_LEFT = "socket.accept() out of system resource"


LoopHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class HttpServer(uvicorn.Server):
    """uvicorn, without its signal handlers and logs.

    Attributes:
        connections: The open connections.
        calls: The observed calls.
        entrance: The outermost ASGI layer: `calls`, or a layer of the application around them.
        most: The most connections and requests.
        limits: The limits of requests and bytes, shared with gRPC.
        certificates: None without TLS.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        measures: Measures | None = None,
        on_call: OnCall | None = None,
    ) -> None:
        """`measures`: None for none; `on_call`: as of `ObservedCalls`."""
        measures = measures or Measures()
        self.most = limits_here(config)
        respond: Respond = getattr(app, "respond", respond_plainly)
        self.limits = RequestLimits(app, self.most.requests, config.max_bodies_bytes, respond)
        self.connections = Connections(config, self.limits, self.most.connections, measures)
        # Calls of an application without routes have no route.
        routes = [each.path for each in getattr(app, "routes", ()) if isinstance(each, Route)]
        known = only_known_callers(self.limits, config, measures, respond)
        self.calls = ObservedCalls(known, measures, routes, config.access_log, on_call)
        entrance = getattr(app, "entrance", None)
        inner: ASGIApp = entrance(self.calls) if entrance else self.calls
        self.entrance: ASGIApp = SocketCalls(inner)
        self._swept_s = 0.0
        self._loop_handler: LoopHandler | None = None
        self.certificates = Certificates(config) if config.tls_certificate else None
        super().__init__(
            uvicorn.Config(
                self.entrance,
                http=self._connect,  # type: ignore[arg-type]  # called as a class
                backlog=self.most.accepted_at_once,
                ws=self._upgrade,  # type: ignore[arg-type]  # called as a class
                ws_max_size=config.max_body_bytes,
                # A small message may not take much memory.
                ws_per_message_deflate=False,
                log_config=None,
                # It has a warning for each malformed request.
                log_level="error",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_NEVER_S,
                # After `shutdown` has ended all calls; uvicorn would log each as a failure.
                timeout_graceful_shutdown=math.ceil(LEAVE_S + 2 * LINGER_S),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._swept_s = loop.time()
        self._loop_handler = loop.get_exception_handler()
        loop.set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for listener in sockets or []:
            # asyncio has set the kernel's backlog to the number it accepts at once.
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ends = (
            loop.call_later(LEAVE_S, self.connections.end_all, _stopped()),
            loop.call_later(LEAVE_S + LINGER_S, self.connections.end_all),
        )
        await super().shutdown(sockets)
        for end in ends:
            end.cancel()
        loop.set_exception_handler(self._loop_handler)

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_EVERY == 0:
            now_s = asyncio.get_running_loop().time()
            self.connections.sweep(now_s - self._swept_s)
            self._swept_s = now_s
            if self.certificates is not None:
                self.certificates.refresh()
        return await super().on_tick(counter)

    def _connect(self, **given: Any) -> asyncio.BaseProtocol:
        connection = Connection(self.connections, **given)
        if self.certificates is None:
            return connection
        return Handshake(self.connections, connection, self.certificates)

    def _upgrade(self, **given: Any) -> asyncio.BaseProtocol:
        from .websocket_connection import WebSocketConnection

        return WebSocketConnection(self.connections, **given)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") == _NO_FILES_LEFT:
            self.connections.count("not_accepted")
        elif self._loop_handler is not None:
            self._loop_handler(loop, context)
        else:
            loop.default_exception_handler(context)


def _stopped() -> EngineError:
    return EngineError(
        "the gateway has stopped; send it again, to another one",
        code="shutting_down",
        retry_after_s=DEFAULT_RETRY_S,
    )
