"""With a real server and real connections."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, GatewayConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.connections import Connection
from nano_inference.gateway.server.server import HttpServer

from ..fake import FakeEngine, chunk

LIMIT_S = 20

Call = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def hanging(request: GenerateRequest) -> list[Output]:
    """One token, and no end."""
    return [chunk(request)]


def serving(engine: FakeEngine) -> AbstractAsyncContextManager[Call]:
    return running(HttpServer(make_app(engine, Config()), GatewayConfig()))


@asynccontextmanager
async def running(server: HttpServer) -> AsyncIterator[Call]:
    """Run a server; the function sends a body to `/generate`."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:

        async def call(body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            lines = (
                "POST /generate HTTP/1.1",
                "Host: 127.0.0.1",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            )
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            return reader, writer

        yield call
        await stack.aclose()
        server.should_exit = True
        await task


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_the_request(engine: FakeEngine, stream: bool) -> None:
    engine.outputs = hanging
    body = json.dumps({"input_ids": [[3], [4]], "rid": "r", "stream": stream}).encode()
    async with serving(engine) as call:
        _, writer = await call(body)
        await engine.until(lambda: len(engine.requests) == 2)
        writer.close()
        await engine.until(lambda: set(engine.left) == {"r_0", "r_1"})


async def test_nagle_s_algorithm_is_off(engine: FakeEngine) -> None:
    server = HttpServer(make_app(engine, Config()), GatewayConfig())
    async with running(server) as call:
        reader, _ = await call(b'{"text": "a"}')
        assert b" 200 " in await reader.readline()
        (connection,) = server.connections._all
        assert isinstance(connection, Connection)
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_connection_serves_on_after_a_defect(engine: FakeEngine) -> None:
    def fail(request: GenerateRequest) -> list[Output]:
        raise ZeroDivisionError

    answer, engine.outputs = engine.outputs, fail
    async with serving(engine) as call:
        reader, writer = await call(b'{"text": "a"}')
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
        assert b"internal_error" in await reader.readexactly(int(length))
        engine.outputs = answer
        body = b'{"text": "a"}'
        more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n" + more.encode() + body)
        assert b" 200 " in await reader.readline()


async def test_signal_handlers_are_unchanged(engine: FakeEngine) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving(engine) as call:
        reader, _ = await call(b'{"text": "a"}')
        assert b" 200 " in await reader.readline()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_calls_in_flight_at_shutdown_get_an_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nano_inference.gateway.server.server.LEAVE_S", 0.1)
    engine.outputs = hanging
    server = HttpServer(make_app(engine, Config()), GatewayConfig())
    async with running(server) as call:
        reader, _ = await call(b'{"text": "a"}')
        await engine.until(lambda: len(engine.requests) == 1)
        server.should_exit = True
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting_down" in answer
    assert len(engine.left) == 1
    assert not caplog.records
