"""Clients that are slow, many, or both keep nobody else waiting, and hold only so much.

The server's clock for its clients is moved by hand (`pass_s`); nothing here waits for time to pass.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
import structlog

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import ConfigError, GatewayConfig
from nano_inference.gateway.server import connections
from nano_inference.gateway.server.limits import SPARE_CONNECTIONS, UNCOUNTED_BYTES, limits_for

from ..gateway.fake import FakeEngine, chunk, completion, sample
from ..gateway.served import LIMIT_S, SMALL, Client, post, serve


def hanging(request: GenerateRequest) -> list[Output]:
    return []


# --- heads --------------------------------------------------------------------------------------


async def test_a_head_that_never_ends_is_given_up(engine: FakeEngine) -> None:
    """Also on a connection that has had requests, from its first byte on."""
    async with serve(engine, GatewayConfig(head_timeout_s=10, keep_alive_s=30)) as served:
        slow = await served.connect(b"GET /health HTTP/1.1\r\nHost: loc")
        silent = await served.connect()
        again = await served.connect(SMALL)
        assert (await again.answer())[0] == 200
        await served.phases("head", "head", "idle")
        served.pass_s(8)
        again.send(SMALL[:9])
        await served.phases("head", "head", "head")
        # A piece that arrives meanwhile makes no difference.
        first, *_ = served.server.connections._all
        slow.send(b"alh")
        await served.until(lambda: first._received_bytes == 34)
        await served.phases("head", "head", "head")
        served.pass_s(2)
        assert await slow.code() == (408, "request_timeout")
        assert await slow.closed()
        assert await silent.closed()
        again.send(SMALL[9:])
        assert (await again.answer())[0] == 200


async def test_a_connection_without_a_request_is_closed_in_the_end(engine: FakeEngine) -> None:
    async with serve(engine, GatewayConfig(head_timeout_s=1, keep_alive_s=30)) as served:
        client = await served.connect(SMALL)
        assert (await client.answer())[0] == 200
        await served.phases("idle")
        served.pass_s(29)
        client.send(SMALL)
        assert (await client.answer())[0] == 200
        await served.phases("idle")
        served.pass_s(30)
        assert await client.closed()


@pytest.mark.parametrize("first", [b"", b"GET /he", SMALL])
async def test_no_number_of_connections_without_requests_shuts_others_out(
    engine: FakeEngine, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LOG_EVERY_S", 3600.0)
    most = 4 + SPARE_CONNECTIONS
    async with serve(engine, GatewayConfig(max_connections=4)) as served:
        with structlog.testing.capture_logs() as lines:
            crowd = [await served.connect(first) for _ in range(3 * most)]
            assert await served.healthy()
            await served.until(lambda: len(served.server.connections) <= most)
            served.pass_s(1)
        # The first have made room.
        for client in crowd[:most]:
            if first == SMALL:
                assert (await client.answer())[0] == 200
            assert await client.closed()
        assert [line["event"] for line in lines].count("connections_not_served") == 1


async def test_a_request_under_way_never_makes_room(engine: FakeEngine) -> None:
    engine.outputs = lambda request: [] if not engine.left else [completion(request)]
    async with serve(engine, GatewayConfig(max_connections=2)) as served:
        worker = await served.connect(post(13, b'{"text": "a"}'))
        await engine.until(lambda: len(engine.requests) == 1)
        for _ in range(3 * SPARE_CONNECTIONS):
            await served.connect()
        assert await served.healthy()
        assert worker.writer.transport.is_closing() is False
        assert not engine.left


async def test_requests_beyond_the_limit_are_refused_with_a_reason(engine: FakeEngine) -> None:
    """In the shape of all errors, with a time to come again, and the connection can do so."""
    engine.outputs = hanging
    async with serve(engine, GatewayConfig(max_connections=2)) as served:
        workers = [await served.connect(post(13, b'{"text": "a"}')) for _ in range(2)]
        await engine.until(lambda: len(engine.requests) == 2)
        client = await served.connect(SMALL)
        status, headers, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        workers[0].writer.close()
        await engine.until(lambda: len(engine.left) == 1)
        client.send(SMALL)
        assert (await client.answer())[0] == 200


async def test_a_head_in_pieces_waits_for_its_round_as_a_whole(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(engine, GatewayConfig()) as served:
        with monkeypatch.context() as patch:
            # A round begins when somebody else comes.
            patch.setattr(connections, "CROWD", 0)
            patch.setattr(connections, "CROWD_PAUSE_S", 3600)
            patch.setattr(connections, "ROUND_S", 3600)  # and has all of the work, however slow
            cut = await served.connect(SMALL[:9])
            await served.phases("come")
            cut.send(SMALL[9:])
            (connection,) = served.server.connections._all
            await served.until(lambda: connection._received_bytes == len(SMALL))
            assert connection.phase == "come"
            other = await served.connect(SMALL.replace(b"\r\n\r\n", b"\r\nX-Tenant: b\r\n\r\n"))
            assert (await cut.answer())[0] == 200
            assert (await other.answer())[0] == 200


# --- bodies -------------------------------------------------------------------------------------


async def test_a_body_that_stalls_is_given_up(engine: FakeEngine) -> None:
    """However much of it has come at first."""
    config = GatewayConfig(body_timeout_s=10, min_body_bytes_per_s=1000)
    async with serve(engine, config) as served:
        client = await served.connect(post(2_000_000, b" " * 1_500_000))
        dripping = await served.connect(post(2_000_000))
        await served.phases("body", "body")
        connection, _ = served.server.connections._all
        await served.until(
            lambda: connection._received_bytes > 1_500_000 and not connection.flow.read_paused
        )
        for _ in range(30):
            dripping.send(b" ")
            served.pass_s(1)
        assert await client.code() == (408, "request_timeout")
        assert await dripping.code() == (408, "request_timeout")
        assert not engine.requests


async def test_a_slow_body_that_goes_on_is_taken(engine: FakeEngine) -> None:
    """Ten times as long as the limit; and while the server does not look, it counts little."""
    config = GatewayConfig(body_timeout_s=10, min_body_bytes_per_s=1000)
    body = json.dumps({"text": "a" * 200_000}).encode()
    async with serve(engine, config) as served:
        client = await served.connect(post(len(body)))
        await served.phases("body")
        (connection,) = served.server.connections._all
        for start in range(0, len(body), 2000):
            before = connection._received_bytes
            client.send(body[start : start + 2000])
            await served.until(lambda before=before: connection._received_bytes > before)  # type: ignore[misc]
            served.server.connections.sweep(1000.0)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("behind", [post(1000, b"{"), SMALL[:9], b"\x16\x03\x01\r\n\r\n"])
async def test_what_is_slow_or_broken_behind_a_request_ends_it_not(
    engine: FakeEngine, behind: bytes
) -> None:
    engine.outputs = hanging
    async with serve(engine, GatewayConfig(body_timeout_s=10)) as served:
        await served.connect(post(13, b'{"text": "a"}') + behind)
        await engine.until(lambda: len(engine.requests) == 1)
        await served.phases("working")
        served.pass_s(30)
        await served.phases("working")
        assert not engine.left


async def test_slow_bodies_make_room_at_once_when_there_is_none(engine: FakeEngine) -> None:
    async with serve(engine, GatewayConfig(max_connections=3, body_timeout_s=60)) as served:
        slow = [await served.connect(post(1000, b"{")) for _ in range(3)]
        await served.phases("body", "body", "body")
        served.pass_s(5)
        assert not await served.healthy()
        served.pass_s(1)
        for client in slow:
            assert await client.code() == (408, "request_timeout")
        assert await served.healthy()


async def test_bodies_that_are_kept_hold_no_more_than_the_budget(engine: FakeEngine) -> None:
    size = 1_000_000
    config = GatewayConfig(
        max_body_bytes=size, max_weights_bytes=size, max_bodies_bytes=2 * size, max_connections=50
    )
    async with serve(engine, config) as served:
        clients = [await served.connect(post(size, b" " * (size - 1))) for _ in range(10)]
        limits = served.server.connections._limits
        statuses = []
        most = 0

        async def watch() -> None:
            nonlocal most
            while len(statuses) < 8:
                most = max(most, limits.held_bytes)
                await asyncio.sleep(0)

        async def status(client: Client) -> None:
            statuses.append(await client.code())

        waiting = [asyncio.create_task(status(client)) for client in clients]
        with structlog.testing.capture_logs() as lines:
            await watch()
        # Not a line for each.
        assert {line["event"] for line in lines} <= {"connections_not_served"}
        assert set(statuses) == {(429, "overloaded")}
        assert size < most <= 2 * size
        # Before it is read, and a small one is taken all the same.
        late = await served.connect(post(size))
        status_, headers, _ = await late.answer()
        assert (status_, headers["retry-after"]) == (429, "1")
        small = await served.connect(post(13, b'{"text": "a"}'))
        assert (await small.answer())[0] == 200
        for task in waiting:
            task.cancel()
        for client in clients:
            client.writer.close()
        await served.until(lambda: limits.held_bytes == 0)


async def test_announced_bodies_hold_nothing(engine: FakeEngine) -> None:
    """A client that announces a large body and sends none of it takes no other client's room."""
    size = UNCOUNTED_BYTES * 4
    config = GatewayConfig(max_body_bytes=size, max_weights_bytes=size, max_bodies_bytes=size)
    body = json.dumps({"text": "a" * (size - 100)}).encode()
    async with serve(engine, config) as served:
        for _ in range(20):
            await served.connect(post(size))
        await served.phases(*["body"] * 20)
        client = await served.connect(post(len(body), body))
        assert (await client.answer())[0] == 200


def test_the_budget_has_room_for_every_body_that_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.max_weights_bytes"):
        GatewayConfig(max_bodies_bytes=1 << 20)


# --- answers ------------------------------------------------------------------------------------


def endless(request: GenerateRequest) -> list[Output]:
    """More than any buffer between the two holds."""
    return [chunk(request, text="a" * 100_000)] * 1000


async def test_a_client_that_takes_nothing_of_its_answer_is_closed(engine: FakeEngine) -> None:
    """Until then no more of a stream is made than the write buffer holds."""
    engine.outputs = endless
    body = json.dumps({"text": "a", "rid": "r", "stream": True}).encode()
    async with serve(engine, GatewayConfig(send_timeout_s=10)) as served:
        client = await served.connect(post(len(body), body))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await engine.until(lambda: len(engine.requests) == 1)
        (connection,) = served.server.connections._all
        await served.until(lambda: connection.flow.write_paused)
        served.pass_s(10)
        assert not engine.left
        assert connection.transport.get_write_buffer_size() < 2_000_000
        served.pass_s(1)
        await engine.until(lambda: engine.left == ["r"])
        await served.phases()


async def test_a_client_that_is_slow_to_take_its_answer_gets_all_of_it(engine: FakeEngine) -> None:
    long = "a" * 20_000_000
    engine.outputs = lambda request: [completion(request, sample(text=long))]
    async with serve(engine, GatewayConfig(send_timeout_s=3, keep_alive_s=3)) as served:
        client = await served.connect(post(13, b'{"text": "a"}'))
        await served.phases("sending")
        (connection,) = served.server.connections._all
        got = 0
        while unsent := connection.transport.get_write_buffer_size():
            served.pass_s(2)
            while connection.transport.get_write_buffer_size() == unsent:
                got += len(await client.reader.read(1 << 20))
        while got < len(long):
            got += len(await client.reader.read(1 << 20))
        served.pass_s(1)
        await served.phases("idle")
        client.send(SMALL)


# --- what is not HTTP, and files ----------------------------------------------------------------


CHUNKED = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
HIDING = (
    b"POST /generate HTTP/%s\r\nHost: localhost\r\n%s" + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + SMALL
)
TOO_LARGE = SMALL.replace(b"\r\n\r\n", b"\r\nX-A: " + b"a" * 66_000 + b"\r\n\r\n")
NOT_HTTP = {
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no chunk": b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"zz\r\n",
    "another version": SMALL.replace(b"HTTP/1.1", b"HTTP/2.0"),
    "a large head": TOO_LARGE,
    # A proxy may go by the length or by the chunks, and take a body's end for another request.
    "length 12": HIDING % (b"1.1", b"Content-Length: 12\r\n"),
    "1.0": HIDING % (b"1.0", b""),
}


@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_a_request_that_is_not_valid_http_is_refused_and_not_logged(
    engine: FakeEngine, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(engine, GatewayConfig()) as served:
        client = await served.connect(sent)
        assert await client.code() == (400, "malformed")
        assert await client.closed()
        assert await served.healthy()
    assert not caplog.records


@pytest.mark.parametrize("grpc_port", [None, 0])
@pytest.mark.parametrize("max_files", [resource.RLIM_INFINITY, 1 << 20, 1024, 256, 64, 16])
def test_there_are_files_for_all_connections(max_files: int, grpc_port: int | None) -> None:
    config = GatewayConfig(grpc_port=grpc_port)
    most = limits_for(config, max_files)
    assert most.requests < most.connections
    if not 0 <= max_files < 1 << 20:
        assert most.requests == config.max_connections
        return
    servers = 1 if grpc_port is None else 2
    # Some are accepted while those whose place they take are being closed.
    assert servers * most.connections + 3 * most.accepted_at_once <= max_files
    assert most.requests >= max_files // 8


SERVER = """
import asyncio, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from nano_inference.config import GatewayConfig
from nano_inference.gateway.server.server import HttpServer

async def app(scope, receive, send):
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})

async def main():
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = HttpServer(app, GatewayConfig())
    task = asyncio.create_task(server.serve([listener]))
    await asyncio.to_thread(sys.stdin.readline)
    # As if all were taken by something else.
    for _ in range(500):
        server._on_loop_error(asyncio.get_running_loop(), {"message": %r})
    server.should_exit = True
    await task

asyncio.run(main())
"""


async def test_more_connections_than_files() -> None:
    """All of 500 connect, the last ones are there, and the log has a few lines."""
    out_of_files = "socket.accept() out of system resource"
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SERVER % out_of_files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            for _ in range(500):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.transport.abort)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.transport.abort)
            writer.write(SMALL)
            assert b" 200 " in await reader.readline()
            log, _ = await asyncio.to_thread(process.communicate, b"\n")
        assert process.returncode == 0
        assert out_of_files.encode() not in log
        assert log.count(b"\n") < 10
    finally:
        process.kill()
        process.wait()
