"""A real server with real connections."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
from asyncio.selector_events import _SelectorSocketTransport
from typing import Any

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import GatewayConfig
from nano_inference.gateway.server.connections import LINGER_S, Connection

from ..fake import FakeEngine, chunk
from ..served import post, serve

TEXT = b'{"text": "a"}'
CALL = post(len(TEXT), TEXT)


def hanging(request: GenerateRequest) -> list[Output]:
    """One token, and no end."""
    return [chunk(request)]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_the_request(engine: FakeEngine, stream: bool) -> None:
    engine.outputs = hanging
    body = json.dumps({"input_ids": [[3], [4]], "rid": "r", "stream": stream}).encode()
    async with serve(engine, GatewayConfig()) as served:
        client = await served.connect(post(len(body), body))
        await engine.until(lambda: len(engine.requests) == 2)
        client.writer.close()
        await engine.until(lambda: set(engine.left) == {"r_0", "r_1"})


async def test_nagle_s_algorithm_is_off(engine: FakeEngine) -> None:
    async with serve(engine, GatewayConfig()) as served:
        assert (await (await served.connect(CALL)).answer())[0] == 200
        (connection,) = served.server.connections._all
        assert isinstance(connection, Connection)
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_connection_serves_on_after_a_defect(engine: FakeEngine) -> None:
    def fail(request: GenerateRequest) -> list[Output]:
        raise ZeroDivisionError

    answer, engine.outputs = engine.outputs, fail
    async with serve(engine, GatewayConfig()) as served:
        client = await served.connect(CALL)
        assert await client.code() == (500, "internal_error")
        engine.outputs = answer
        client.send(CALL)
        assert (await client.answer())[0] == 200


async def test_signal_handlers_are_unchanged(engine: FakeEngine) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serve(engine, GatewayConfig()) as served:
        assert (await (await served.connect(CALL)).answer())[0] == 200
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_calls_in_flight_at_shutdown_get_an_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nano_inference.gateway.server.server.LEAVE_S", 0.1)
    engine.outputs = hanging
    async with serve(engine, GatewayConfig()) as served:
        client = await served.connect(CALL)
        await engine.until(lambda: len(engine.requests) == 1)
        served.server.should_exit = True
        answer = await client.reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting_down" in answer
    assert len(engine.left) == 1
    assert not caplog.records


async def test_a_reset_while_an_error_is_sent_is_no_failure(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: failures.append(about))

    def reset(self: asyncio.Transport) -> None:
        raise OSError(errno.ENOTCONN, "the client has reset the connection")

    monkeypatch.setattr(_SelectorSocketTransport, "write_eof", reset)
    async with serve(engine, GatewayConfig()) as served:
        assert await (await served.connect(b"nothing of HTTP\r\n\r\n")).code() == (400, "malformed")
        served.pass_s(int(LINGER_S))
        await served.phases()
    assert failures == []
