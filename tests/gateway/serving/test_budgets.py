"""A call may take as long as its header or body says, from its arrival on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from nano_inference.config import GatewayConfig
from nano_inference.gateway.call import BUDGET_HEADER, MAX_BUDGET_MS
from nano_inference.gateway.server import connections
from nano_inference.gateway.server.http import ARRIVED
from nano_inference.telemetry import now_ns

from ..errors import error_of
from ..fake import Client, FakeEngine, app_of, http_of
from ..served import post, serve

MINUTE_NS = 60 * 10**9


@asynccontextmanager
async def arriving(engine: FakeEngine, ago_ns: int) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose calls have arrived some time ago."""
    app: ASGIApp = app_of(engine)

    async def arrived(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {ARRIVED: now_ns() - ago_ns}}, receive, send)

    async with http_of(arrived) as client:
        yield client


@pytest.mark.parametrize(
    ("header", "field", "budget_ns"),
    [
        (None, None, None),
        ("60000", None, MINUTE_NS),
        (None, 60_000, MINUTE_NS),
        (None, 60_000.5, MINUTE_NS + 500_000),
        ("90000.5", 60_000, MINUTE_NS),
        ("60000", 90_000, MINUTE_NS),
        (str(int(MAX_BUDGET_MS) - 1000), None, 2**63),
    ],
)
async def test_the_shortest_budget_holds(
    engine: FakeEngine, header: str | None, field: float | None, budget_ns: int | None
) -> None:
    """The budget counts from the call's arrival."""
    body = {"text": ["a", "b"]} | ({} if field is None else {"budget_ms": field})
    headers = {} if header is None else {BUDGET_HEADER: header}
    async with arriving(engine, 20 * 10**9) as http:
        assert (await http.post("/generate", json=body, headers=headers)).status_code == 200
    assert len(engine.requests) == 2
    for request in engine.requests:
        if budget_ns is None:
            assert request.budget_ns is None
        else:
            assert MINUTE_NS / 2 < request.budget_ns <= budget_ns - 20 * 10**9


@pytest.mark.parametrize("given", ["0", "-5", "19999"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_expired_call_is_refused_at_once(
    engine: FakeEngine, given: str, stream: bool
) -> None:
    async with arriving(engine, 20 * 10**9) as http:
        body = {"text": "a", "stream": stream}
        answer = await http.post("/generate", json=body, headers={BUDGET_HEADER: given})
    assert error_of(answer, 504) == "expired"
    assert BUDGET_HEADER in answer.text
    assert not engine.requests


async def test_waiting_for_a_round_counts_against_the_budget(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive together begin one after the other."""
    body = b'{"text": "a", "budget_ms": 60000}'
    async with serve(engine, GatewayConfig()) as served:
        assert (await (await served.connect(post(len(body), body))).answer())[0] == 200
        monkeypatch.setattr(connections, "now_ns", lambda: now_ns() - 61 * 10**9)
        client = await served.connect(post(len(body), body))
        assert await client.code() == (504, "expired")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("header", ["", "soon", "1e3", "inf", "nan", "1,5", "1" * 18, "0x10"])
async def test_an_invalid_budget_header_is_refused(http: Client, header: str) -> None:
    answer = await http.post("/generate", json={"text": "a"}, headers={BUDGET_HEADER: header})
    assert error_of(answer, 400) == "invalid_budget"
    assert BUDGET_HEADER in answer.text
    assert "milliseconds" in answer.text
    assert not http.engine.requests


@pytest.mark.parametrize(
    ("field", "code"),
    [(1e300, "invalid_budget"), ("1000", "invalid_request"), ([1], "invalid_request")],
)
async def test_an_invalid_budget_field_is_refused(http: Client, field: object, code: str) -> None:
    answer = await http.post("/generate", json={"text": "a", "budget_ms": field})
    assert error_of(answer, 400) == code
    assert "budget_ms" in answer.text
    assert not http.engine.requests
