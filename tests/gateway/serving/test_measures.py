"""Refused connections and calls are counted by reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import httpx
import pytest

from nano_inference.config import GatewayConfig, RequestError, load_config
from nano_inference.gateway.server.callers import only_known_callers
from nano_inference.gateway.server.connections import Connections
from nano_inference.gateway.server.limits import SPARE_CONNECTIONS, RequestLimits
from nano_inference.gateway.server.measures import Reason
from nano_inference.telemetry import names
from nano_inference.telemetry.instruments import (
    GATEWAY_CONNECTIONS,
    GATEWAY_REFUSED,
    GATEWAY_WAITING,
)

from ...security.test_connections import endless, hanging
from ..errors import error_of
from ..fake import FakeEngine, app_of, completion, http_of
from ..recorded import Recorded
from ..served import post, serve

ONE = post(13, b'{"text": "a"}')


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@asynccontextmanager
async def calling(
    engine: FakeEngine, recorded: Recorded, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    overrides = {f"gateway.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides)
    app = app_of(engine, config, recorded.measures)
    checked = only_known_callers(app, config.gateway, recorded.measures)
    async with http_of(checked) as client:
        yield client


async def test_every_reason_starts_at_zero(recorded: Recorded) -> None:
    assert recorded.values(GATEWAY_REFUSED) == {(reason,): 0 for reason in get_args(Reason)}
    assert GATEWAY_REFUSED.attributes == (names.GATEWAY_REASON,)


# --- connections --------------------------------------------------------------------------------


async def test_replaced_connections_are_counted(engine: FakeEngine, recorded: Recorded) -> None:
    most = 1 + SPARE_CONNECTIONS
    async with serve(engine, GatewayConfig(max_connections=1), recorded.measures) as served:
        for _ in range(most):
            await served.connect()
        await served.until(lambda: len(served.server.connections) == most)
        assert recorded.refused() == {}
        for _ in range(5):
            await served.connect()
        await served.until(lambda: recorded.refused() == {"replaced": 5})
        await served.until(lambda: recorded.values(GATEWAY_CONNECTIONS) == {(): most})
    assert recorded.values(GATEWAY_CONNECTIONS) == {(): 0}


class Busy:
    """A connection with a request under way."""

    phase = "working"
    error: RequestError | None = None

    def end(self, error: RequestError | None = None) -> None:
        self.error = error


async def test_a_refused_connection_is_counted(recorded: Recorded) -> None:
    limits = RequestLimits(app_of(FakeEngine()), 1, 1)
    connections = Connections(GatewayConfig(), limits, 1, recorded.measures)
    first, second = Busy(), Busy()
    connections.enter(first)  # type: ignore[arg-type]
    connections.enter(second)  # type: ignore[arg-type]
    assert first.error is None
    assert second.error.code == "overloaded"
    assert recorded.refused() == {"all_busy": 1}


async def test_slow_clients_are_counted_by_phase(engine: FakeEngine, recorded: Recorded) -> None:
    config = GatewayConfig(head_timeout_s=5, body_timeout_s=10, send_timeout_s=20)
    body = json.dumps({"text": "a", "stream": True}).encode()
    engine.outputs = endless
    async with serve(engine, config, recorded.measures) as served:
        reader = await served.connect(post(len(body), body))
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await engine.until(lambda: len(engine.requests) == 1)
        (connection,) = served.server.connections._all
        await served.until(lambda: connection.flow.write_paused)
        await served.connect(b"GET /health HT")
        await served.connect(post(1000, b"{"))
        await served.phases("working", "head", "body")
        served.pass_s(4)
        assert recorded.refused() == {}
        served.pass_s(2)
        assert recorded.refused() == {"slow_head": 1}
        served.pass_s(5)
        assert recorded.refused() == {"slow_head": 1, "slow_body": 1}
        served.pass_s(10)
        assert recorded.refused() == {"slow_head": 1, "slow_body": 1, "slow_reader": 1}


async def test_connections_that_can_not_be_accepted_are_counted(
    engine: FakeEngine, recorded: Recorded
) -> None:
    async with serve(engine, GatewayConfig(), recorded.measures) as served:
        context = {"message": "socket.accept() out of system resource"}
        served.server._on_loop_error(asyncio.get_running_loop(), context)
    assert recorded.refused() == {"not_accepted": 1}


# --- limits -------------------------------------------------------------------------------------


async def test_requests_beyond_the_limit_are_counted(
    engine: FakeEngine, recorded: Recorded
) -> None:
    engine.outputs = hanging
    async with serve(engine, GatewayConfig(max_connections=1), recorded.measures) as served:
        await served.connect(ONE)
        await engine.until(lambda: len(engine.requests) == 1)
        for _ in range(3):
            assert await (await served.connect(ONE)).code() == (429, "overloaded")
        served.pass_s(1)
    assert recorded.refused() == {"too_many_requests": 3}


@pytest.mark.parametrize("announced", [True, False])
async def test_bytes_beyond_the_limit_are_counted(
    engine: FakeEngine, recorded: Recorded, announced: bool
) -> None:
    size = 1_000_000
    config = GatewayConfig(max_body_bytes=size, max_weights_bytes=size, max_bodies_bytes=size)
    async with serve(engine, config, recorded.measures) as served:
        served.server.connections._limits.held_bytes = size
        chunk = b"%x\r\n" % 200_000 + b" " * 200_000 + b"\r\n"
        client = await served.connect(post(size) if announced else post(None, chunk))
        assert await client.code() == (429, "overloaded")
        served.server.connections.sweep(0.0)
    assert recorded.refused() == {"too_many_bytes": 1}


# --- places -------------------------------------------------------------------------------------


async def test_waiting_and_shed_calls_are_counted(engine: FakeEngine, recorded: Recorded) -> None:
    engine.outputs = hanging
    async with calling(engine, recorded, max_in_flight=2, max_waiting=3) as http:
        running = [
            asyncio.create_task(http.post("/generate", json=body))
            for body in ({"text": "a"}, {"text": ["b", "c", "d"]})
        ]
        await engine.until(lambda: len(engine.requests) == 1)
        while recorded.values(GATEWAY_WAITING) != {(): 3}:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert recorded.refused() == {}
        for stream in (False, True):
            answer = await http.post("/generate", json={"text": "e", "stream": stream})
            assert error_of(answer, 429) == "overloaded"
            assert answer.headers["retry-after"] == "5"
        assert recorded.refused() == {"too_many_waiting": 2}
        for call in running:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert recorded.values(GATEWAY_WAITING) == {(): 0}


async def test_calls_that_expire_while_waiting_are_counted(
    engine: FakeEngine, recorded: Recorded
) -> None:
    engine.outputs = hanging
    async with calling(engine, recorded, max_in_flight=2) as http:
        first = asyncio.create_task(http.post("/generate", json={"text": "a"}))
        await engine.until(lambda: len(engine.requests) == 1)
        for stream in (False, True):
            body = {"text": "b", "stream": stream, "budget_ms": 20}
            assert error_of(await http.post("/generate", json=body), 504) == "expired"
        assert len(engine.requests) == 1
        assert recorded.refused() == {"expired": 2}
        assert recorded.values(GATEWAY_WAITING) == {(): 0}
        engine.outputs = lambda request: [completion(request)]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await http.post("/generate", json={"text": "c"})).status_code == 200


# --- callers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "reason"),
    [
        ({"Host": "evil.example"}, 403, "forbidden_host"),
        ({"Origin": "https://evil.example"}, 403, "forbidden_origin"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "forbidden_origin"),
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    ],
)
async def test_refused_callers_are_counted(
    engine: FakeEngine, recorded: Recorded, headers: dict[str, str], status: int, reason: str
) -> None:
    async with calling(engine, recorded) as http:
        given: dict[str, Any] = {"Content-Type": "application/json"} | headers
        answer = await http.post("/generate", content=b'{"text": "a"}', headers=given)
        assert error_of(answer, status) == reason
    assert recorded.refused() == {reason: 1}


async def test_a_browser_s_get_is_counted(engine: FakeEngine, recorded: Recorded) -> None:
    async with calling(engine, recorded) as http:
        answer = await http.get("/flush_cache", headers={"User-Agent": "Mozilla/5.0"})
        assert error_of(answer, 403) == "forbidden_origin"
    assert recorded.refused() == {"forbidden_origin": 1}
