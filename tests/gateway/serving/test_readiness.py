"""Draining: no new requests, not ready, and calls in flight end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.gateway.serving.lane_state import Readiness
from nano_inference.gateway.serving.measures import Measures
from nano_inference.telemetry import TraceContext

from ..errors import error_of
from ..fake import FakeEngine, http_of

LIMIT_S = 20

ASKED = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


class Waiting(FakeEngine):
    """Answers while it `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def submit(
        self, request: GenerateRequest, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        outputs = super().submit(request, trace)
        async for output in outputs:
            await self.goes_on.wait()
            yield output


@pytest.fixture
def engine() -> Waiting:
    return Waiting()


@pytest.fixture
def readiness(engine: FakeEngine) -> Readiness:
    return Readiness(engine)  # type: ignore[arg-type]


@pytest.fixture
def calls(engine: FakeEngine, readiness: Readiness) -> ObservedCalls:
    app = make_app(engine, Config(), None, readiness)  # type: ignore[arg-type]
    return ObservedCalls(app, Measures(), ASKED)


@pytest.fixture
async def http(calls: ObservedCalls) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(calls) as client:
        yield client


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_draining_gateway_refuses_requests(
    http: httpx.AsyncClient, engine: FakeEngine, readiness: Readiness, path: str, stream: bool
) -> None:
    readiness.draining = True
    answer = await http.post(path, json=ASKED[path] | {"stream": stream})
    assert error_of(answer, 503) == "shutting_down"
    assert answer.headers["retry-after"] == "1"
    assert not engine.requests


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
async def test_a_draining_gateway_is_not_ready(
    http: httpx.AsyncClient, engine: FakeEngine, readiness: Readiness, path: str
) -> None:
    assert (await http.get(path)).status_code == 200
    readiness.draining = True
    assert error_of(await http.get(path), 503) == "not_ready"
    assert len(engine.requests) <= 1, "no token is asked for"


async def test_calls_in_flight_end_while_draining(
    http: httpx.AsyncClient, engine: Waiting, readiness: Readiness, calls: ObservedCalls
) -> None:
    engine.goes_on.clear()
    async with asyncio.timeout(LIMIT_S):
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "n": 2}))
        await engine.until(lambda: len(engine.requests) == 1)
        readiness.draining = True
        drained = asyncio.create_task(calls.observer.idle())
        # A probe meanwhile changes nothing.
        assert (await http.get("/health")).status_code == 503
        assert not drained.done()
        engine.goes_on.set()
        assert (await call).status_code == 200
        await drained


async def test_draining_without_calls_returns_at_once(
    calls: ObservedCalls,
) -> None:
    async with asyncio.timeout(LIMIT_S):
        await calls.observer.idle()
