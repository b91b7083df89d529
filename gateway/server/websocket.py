"""WebSockets whose messages are HTTP calls.

Each message runs as a call of its own through all layers of the server, with the headers of the
handshake: the same checks of callers, limits, policy, traces and logs apply, and a message in a
deployment of several models reaches the model that it names. The handshake itself is a GET, which
an endpoint answers with `Upgrade`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import anyio
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...telemetry import now_ns
from .http import ARRIVED, MAY_RETURN, UNREAD, EventStream, Response

UPGRADE = "upgrade"
"""Key of a scope's state: takes the server of an accepted connection."""

WORKING = "working"
"""Key of a scope's state: tells the connection whether a call of it is in flight."""

NORMAL_CLOSURE, GOING_AWAY = 1000, 1001
"""Codes of a client that has left; any other is of a connection that was cut."""

_ACCEPTED = 101
_NO_SOCKET = 426
# Of the handshake alone, or of one call.
_DROPPED = (
    b"connection",
    b"content-",
    b"idempotency-key",
    b"last-event-id",
    b"sec-websocket-",
    b"transfer-encoding",
    b"upgrade",
    b"x-request-id",
)

OnEvent = Callable[[bytes, bytes], Awaitable[None]]
"""Takes the name and the data of an event of a stream."""


class Busy(Protocol):
    """Sets whether a call of the connection is in flight."""

    def __call__(self, working: bool) -> None: ...


class Upgrade(Response):
    """The answer to a handshake that is accepted.

    Over plain HTTP it has the status 426, Upgrade Required.
    """

    def __init__(self, serve: Callable[[Socket], Awaitable[None]]) -> None:
        """`serve`: serves the connection until it returns."""
        super().__init__(status_code=_NO_SOCKET, headers={"Upgrade": "websocket"})
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = scope.get("state", {}).get(UPGRADE)
        if accepted is not None:
            accepted.append(self._serve)
            self.status_code = _ACCEPTED
        await super().__call__(scope, receive, send)


@dataclass(eq=False)
class InnerCall:
    """A call of a connection, and what is answered to it.

    Attributes:
        status: The status of its response; 0 before that has begun.
        body: The body, unless it is a stream of events.
        left: Set to end it as if its client had left.
    """

    method: str
    path: str
    query: bytes = b""
    body_sent: bytes = b""
    on_event: OnEvent | None = None
    status: int = 0
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    left: anyio.Event = field(default_factory=anyio.Event)
    _streams: bool = False
    _taken: bool = False

    async def receive(self) -> Message:
        if not self._taken:
            self._taken = True
            return {"type": "http.request", "body": self.body_sent, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.response_headers = list(message.get("headers", []))
            kind = dict(self.response_headers).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            return
        self.body += message.get("body", b"")
        while self._streams and b"\n\n" in self.body:
            event, _, self.body = self.body.partition(b"\n\n")
            lines = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            if self.on_event is not None and b"data" in lines:
                await self.on_event(lines.get(b"event", b""), lines[b"data"])


class Socket:
    """An accepted connection.

    Attributes:
        path: The path of its address.
        close_code: The code with which the client closed it; None while it is open.
    """

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope = app, scope
        self._receive, self._send = receive, send
        self.path: str = scope["path"]
        self.close_code: int | None = None
        self._working: Busy | None = scope.get("state", {}).get(WORKING)

    async def receive(self) -> str | bytes | None:
        """Return the next message; None once the connection is closed."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.close_code = message.get("code", NORMAL_CLOSURE)
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, text: str) -> None:
        """Send a message, when the client has read enough of those before.

        To a client that has gone nothing is sent; `receive` returns None.
        """
        with suppress(OSError):  # uvicorn's ClientDisconnected
            await self._send({"type": "websocket.send", "text": text})

    def working(self, working: bool) -> None:
        """Set whether a call is in flight; a connection without one may be replaced."""
        if self._working is not None:
            self._working(working)

    @property
    def left(self) -> bool:
        """Whether the client has closed the connection, which was not cut."""
        return self.close_code in (NORMAL_CLOSURE, GOING_AWAY)

    def _is_cut(self) -> bool:
        return self.close_code is not None and not self.left

    async def call(self, inner: InnerCall, upgrade: list[Any] | None = None) -> InnerCall:
        """Run a call through all layers."""
        scope = self._scope
        headers = [each for each in scope["headers"] if not each[0].startswith(_DROPPED)]
        if inner.body_sent:
            headers += [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(inner.body_sent)).encode()),
            ]
        state = {key: value for key, value in scope["state"].items() if key != UNREAD}
        state |= {ARRIVED: now_ns(), MAY_RETURN: self._is_cut}
        if upgrade is not None:
            state[UPGRADE] = upgrade
        await self._app(
            {
                "type": "http",
                "asgi": scope["asgi"],
                "http_version": "1.1",
                "server": scope.get("server"),
                "client": scope.get("client"),
                "scheme": "https" if scope["scheme"] == "wss" else "http",
                "method": inner.method,
                "root_path": scope.get("root_path", ""),
                "path": inner.path,
                "raw_path": inner.path.encode(),
                "query_string": inner.query,
                "headers": headers,
                "state": state,
            },
            inner.receive,
            inner.send,
        )
        return inner


class SocketStream(EventStream):
    """Server-sent events; over a WebSocket, whose handshake is the same call, each is a message."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if UPGRADE in scope.get("state", {}):
            serve = partial(_send_events, scope.get("query_string", b""))
            await Upgrade(serve)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


async def _send_events(query: bytes, socket: Socket) -> None:
    """Send the events of the handshake's call, or its error, until the client leaves."""

    async def pass_on(name: bytes, data: bytes) -> None:
        await socket.send(data.decode())

    inner = InnerCall("GET", socket.path, query, on_event=pass_on)

    async def watch() -> None:
        while await socket.receive() is not None:
            pass
        inner.left.set()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await socket.call(inner)
        if inner.status >= 400:
            error = {"type": "error", "status": inner.status, **msgspec.json.decode(inner.body)}
            await socket.send(msgspec.json.encode(error).decode())
        group.cancel_scope.cancel()


@dataclass(eq=False)
class SocketCalls:
    """ASGI: serves WebSockets by the application's own HTTP calls.

    Attributes:
        app: All layers of the server for HTTP.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        scope = {**scope, "state": {**scope.get("state", {})}}
        socket = Socket(self.app, scope, receive, send)
        await receive()  # websocket.connect
        upgrade: list[Callable[[Socket], Awaitable[None]]] = []
        asked = InnerCall("GET", socket.path, scope.get("query_string", b""))
        await socket.call(asked, upgrade)
        if not upgrade:
            # A path with another endpoint has no WebSocket.
            status = asked.status if asked.status >= 400 else _NO_SOCKET
            kept = [each for each in asked.response_headers if each[0] != b"content-length"]
            start = {"type": "websocket.http.response.start", "status": status, "headers": kept}
            await send(start)
            await send({"type": "websocket.http.response.body", "body": asked.body})
            return
        kept = [each for each in asked.response_headers if each[0] == b"x-request-id"]
        await send({"type": "websocket.accept", "headers": kept})
        await upgrade[0](socket)
        if socket.close_code is None:
            await send({"type": "websocket.close", "code": NORMAL_CLOSURE})
