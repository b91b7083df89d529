"""A real HTTP server, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from nano_inference.config import Config, GatewayConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.server.server import HttpServer

from .fake import FakeEngine

LIMIT_S = 30

SMALL = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(size: int | None, body: bytes = b"") -> bytes:
    """Return a call of `/generate` with the beginning of a body of `size` bytes; None: chunked."""
    lines = (
        "POST /generate HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def abort(self) -> None:
        self.writer.transport.abort()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split()[1]), headers, body

    async def code(self) -> tuple[int, str]:
        status, _, body = await self.answer()
        return status, json.loads(body)["error"]["code"]

    async def closed(self) -> bool:
        """Wait until the server closes; return whether it sent no more bytes."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class Served:
    """A server, and clients of it."""

    def __init__(self, server: HttpServer, port: int, stack: AsyncExitStack) -> None:
        self.server, self.port, self._stack = server, port, stack

    async def connect(self, first: bytes = b"", context: ssl.SSLContext | None = None) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=context))
        # This also keeps the client: asyncio closes unreferenced connections.
        self._stack.callback(client.abort)
        client.send(first)
        return client

    async def healthy(self) -> bool:
        return (await (await self.connect(SMALL)).answer())[0] == 200

    async def until(self, holds: Callable[[], bool]) -> None:
        """Run the event loop until this holds; the test's time limit ends it."""
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def phases(self, *wanted: str) -> None:
        """Wait until the connections are in these phases, in order of arrival."""
        await self.until(lambda: tuple(x.phase for x in self.server.connections._all) == wanted)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.server.connections.sweep(1.0)


S = TypeVar("S", bound=Served)


@asynccontextmanager
async def listening(server: HttpServer) -> AsyncIterator[int]:
    """Run a server on a free port while the context is open."""
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def serve(
    engine: FakeEngine,
    config: GatewayConfig,
    measures: Measures | None = None,
    kind: type[S] = Served,
) -> AsyncIterator[S]:
    server = HttpServer(make_app(engine, Config(gateway=config), measures), config, measures)
    async with asyncio.timeout(LIMIT_S), listening(server) as port, AsyncExitStack() as stack:
        yield kind(server, port, stack)
