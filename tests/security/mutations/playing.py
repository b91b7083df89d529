"""A server of this process, and clients that do what cases say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from nano_inference.config import GatewayConfig
from nano_inference.gateway.server.server import HttpServer

from ...gateway.served import listening
from .bodies import usual
from .interfaces import Interfaces
from .wire import Answer, Case, Wanted, asked, check, read_answer

LIMIT_S = 60


class Server:
    """The gateway's, and what its connections have received.

    Attributes:
        connections: Those that there are.
        port: Where it listens.
    """

    def __init__(self, server: HttpServer, port: int) -> None:
        self.port = port
        self.connections = server.connections
        self._met: set[int] = set()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)

    def has_taken(self, port: int, number: int) -> bool:
        """Whether so many bytes of a client were taken, or no more of it will be."""
        for connection in self.connections._all:
            # A handshake is nobody's yet.
            client = getattr(connection, "client", None)
            if client is not None and client[1] == port:
                self._met.add(port)
                return connection._left or connection._received_bytes >= number
        return port in self._met

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.connections.sweep(1.0)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def is_at_rest(self) -> bool:
        """Whether nothing of any request is left."""
        under_way = {each.phase for each in self.connections._all} - {"idle"}
        return not under_way and not self.connections._limits.held_bytes


@asynccontextmanager
async def served(app: ASGIApp, config: GatewayConfig) -> AsyncIterator[Server]:
    """Serve an application at a port of this process."""
    server = HttpServer(app, config)
    async with listening(server) as port:
        yield Server(server, port)


async def play(server: Server, case: Case, usuals: dict[str, str]) -> None:
    """Does what a case says, and looks at the answers."""
    reader, writer = await server.connect()
    port, sent = writer.get_extra_info("sockname")[1], 0
    try:
        for place, piece in enumerate(case.pieces):
            writer.write(piece)
            sent += len(piece)
            if case.pass_s or place + 1 < len(case.pieces):
                await server.until(lambda sent=sent: server.has_taken(port, sent))  # type: ignore[misc]
        if case.ends:
            writer.write_eof()
        server.pass_s(case.pass_s)
        for wanted in case.wanted:
            answer = await read_answer(reader, bodiless=wanted.bodiless)
            check(answer, wanted, usuals.get(case.path, ""))
        if case.closed:
            try:
                assert await reader.read() == b""
            except ConnectionError:
                assert case.ends
    finally:
        writer.transport.abort()


class Bystander:
    """Somebody who asks for the same all the time, on one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, interfaces: Interfaces
    ) -> None:
        self._reader, self._writer, self._interfaces = reader, writer, interfaces
        self._usuals: dict[str, str] = {}
        self.answered = 0

    async def ask(self) -> None:
        """Asserts that the answer is what it always is."""
        interface = self._interfaces[self.answered % len(self._interfaces)]
        answer = await self.get(interface.call(usual(interface)))
        usuals = self._usuals
        check(answer, Wanted(same=True), usuals.setdefault(interface.path, asked(answer)))
        self.answered += 1

    async def usuals(self, interfaces: Interfaces) -> dict[str, str]:
        """Return each interface's request to the engine for its usual body, by path; see
        `wire.asked`.
        """
        return {each.path: asked(await self.get(each.call(usual(each)))) for each in interfaces}

    async def get(self, raw: bytes) -> Answer:
        self._writer.write(raw)
        return await read_answer(self._reader)


def told(case: Case, name: str, error: Exception) -> AssertionError:
    """A failure that says which case it is, and with what bytes."""
    raw = b" | ".join(case.pieces)
    return AssertionError(
        f"{name} ({case.kind}, {case.path}): {error!r}\n"
        f"wanted {case.wanted}\nsent {len(raw)} bytes: {raw[:3000]!r}"
    )
