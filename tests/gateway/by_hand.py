"""Calls of an ASGI application by clients that read slowly, or disconnect.

httpx's transport for applications waits for whole answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio

Message = dict[str, Any]
Send = Callable[[Any], Awaitable[None]]


async def ignore(message: Message) -> None:
    """Takes a message of an answer, and does nothing with it."""


async def post(
    app: Any,
    path: str,
    body: Any,
    send: Send = ignore,
    left: Any = None,
    headers: Iterable[tuple[str, str]] = (),
) -> None:
    """Calls an application, until it has answered.

    Args:
        body: Is sent as JSON.
        send: Takes each message of the answer.
        left: An event, anyio's or asyncio's; when it is set, the client goes. None: it stays.
        headers: Beside those that every call has.
    """
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await (anyio.Event() if left is None else left).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            *((name.lower().encode(), value.encode()) for name, value in headers),
        ],
        "query_string": b"",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }
    await app(scope, receive, send)
