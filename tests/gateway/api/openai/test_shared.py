"""What stands before OpenAI's interface is what stands before the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from httpx import AsyncClient, Response

from nano_inference.config import Config, load_config

from ...fake import FakeEngine
from ...made import cut

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    ("/inference/v1/generate", {"token_ids": [5]}),
]


@pytest.fixture
def config() -> Config:
    # One tenant has one place, and one more call may wait.
    return load_config(env={}, overrides={"gateway.max_in_flight": 2, "gateway.max_waiting": 1})


async def ended(*calls: asyncio.Task[Response]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_places_are_those_of_all_interfaces(
    http: AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.outputs = cut
    first = asyncio.create_task(http.post("/generate", json={"text": "a"}))
    await engine.until(lambda: len(engine.requests) == 1)
    calls = [asyncio.create_task(http.post(path, json=body)) for _ in range(2)]
    # One waits, and the newest is sent away; another tenant finds the place that is left.
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (answer,) = [call.result() for call in done]
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"]
    other = asyncio.create_task(http.post(path, json=body, headers={"X-Tenant": "other"}))
    await engine.until(lambda: len(engine.requests) == 2)
    assert engine.requests[1].tenant == "other"
    await ended(first, other, *waiting)


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("given", [{"X-Budget-Ms": "60000"}, {}])
async def test_the_time_that_is_left_goes_with_the_request(
    http: AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    given: dict[str, str],
) -> None:
    fields = {} if given else {"budget_ms": 60_000}
    await http.post(path, json=body | fields, headers=given)
    (request,) = engine.requests
    assert request.budget_ns is not None
    assert 0 < request.budget_ns <= 60_000_000_000


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_time_at_all_is_too_late(
    http: AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = await http.post(path, json=body | {"budget_ms": 0, "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "expired"
    assert not engine.requests


async def test_the_header_names_the_tenant(http: AsyncClient, engine: FakeEngine) -> None:
    for path, body in CALLS:
        await http.post(path, json=body, headers={"X-Tenant": "mine"})
    assert [request.tenant for request in engine.requests] == ["mine"] * len(CALLS)
