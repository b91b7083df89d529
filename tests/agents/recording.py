"""A record of the calls that reach a gateway, and of its answers."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST_BYTES = 1 << 16


class RecordedCall(msgspec.Struct):
    """A call, and its answer.

    Attributes:
        body: As JSON, or as text; empty without one.
        status: 0 if there was no answer.
        ignored: Fields of the body that the gateway ignored, as its answer names them.
        answer: Beginning of the answer's body.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any = ""
    status: int = 0
    ignored: list[str] = []
    answer: str = ""


class Recorder:
    """Records the calls of an ASGI application.

    Attributes:
        calls: In order of arrival.
    """

    def __init__(self, log: BinaryIO | None = None) -> None:
        """`log`: gets each call as a line of JSON once it has ended."""
        self.calls: list[RecordedCall] = []
        self._log = log

    @property
    def failed(self) -> list[RecordedCall]:
        """Calls with an error, or without an answer."""
        return [call for call in self.calls if not 100 <= call.status < 400]

    @property
    def ignored(self) -> list[str]:
        """All ignored fields, sorted."""
        return sorted({name for call in self.calls for name in call.ignored})

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with its calls recorded."""

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] not in ("http", "websocket"):
                return await app(scope, receive, send)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            query = scope["query_string"].decode()
            path = scope["path"] + (f"?{query}" if query else "")
            call = RecordedCall(scope.get("method", "WEBSOCKET"), path, headers)
            self.calls.append(call)
            body, answer = bytearray(), bytearray()

            async def received() -> Message:
                message = await receive()
                body.extend(message.get("body") or (message.get("text") or "").encode())
                return message

            async def sent(message: Message) -> None:
                if message["type"].endswith((".start", ".accept")):
                    call.status = message.get("status", 101)
                    found = dict(message.get("headers") or ()).get(b"x-ignored-fields", b"")
                    call.ignored = [name for name in found.decode().split(", ") if name]
                if len(answer) < _MOST_BYTES:
                    answer.extend(message.get("body") or (message.get("text") or "").encode())
                await send(message)

            try:
                await app(scope, received, sent)
            finally:
                call.body, call.answer = _read(bytes(body)), answer.decode(errors="replace")
                if self._log is not None:
                    self._log.write(msgspec.json.encode(call) + b"\n")

        return recorded


def _read(body: bytes) -> Any:
    text = body.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
