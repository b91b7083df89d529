"""Our own client and the gateway: what one says the other understands, errors above all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from nano_inference.gateway.api.kserve.served import ServedModel
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.server import server
from nano_inference.kserve import KServeClient, KServeError, NamedTensor

from ....errors import raises
from ...fake import FakeEngine, refused
from .calls import Model, served, until

TOKENS = [NamedTensor("input_ids", np.array([1, 2, 3]))]
NUMBERS = NamedTensor("x", np.arange(100, dtype=np.float32))

Ask = Callable[[KServeClient, str, list[NamedTensor]], Awaitable[Any]]


async def infer(client: KServeClient, model: str, inputs: list[NamedTensor]) -> Any:
    return await client.infer(model, inputs, id="it", budget_ns=10**11)


async def stream(client: KServeClient, model: str, inputs: list[NamedTensor]) -> Any:
    return [each async for each in client.stream(model, inputs, id="it", budget_ns=10**11)]


both_ways = pytest.mark.parametrize("ask", [infer, stream])


@asynccontextmanager
async def called(
    *models: ServedModel, **settings: Any
) -> AsyncIterator[tuple[Gateway, KServeClient]]:
    async with (
        served(*models, **settings) as (gateway, _),
        KServeClient(f"127.0.0.1:{gateway.grpc_port}", retries=0) as client,
    ):
        yield gateway, client


# What the engine ends a request with.
MEANINGS = {
    "expired": grpc.StatusCode.DEADLINE_EXCEEDED,
    "prompt_too_long": grpc.StatusCode.INVALID_ARGUMENT,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "lane_failed": grpc.StatusCode.INTERNAL,
}


@both_ways
async def test_engine_errors_reach_the_client(ask: Ask) -> None:
    engine = FakeEngine()
    async with called(engine=engine) as (_, client):
        for code, status in MEANINGS.items():
            engine.outputs = refused(code, f"not this one: {code}")
            with raises(code, f"not this one: {code}", KServeError, status=status):
                await ask(client, "tiny.tokens", TOKENS)


async def test_a_stopping_server_says_when_to_retry() -> None:
    async with called(Model()) as (gateway, client):
        assert await gateway.drain(0)
        unavailable = {"status": grpc.StatusCode.UNAVAILABLE, "retry_after_s": 1.0}
        with raises("shutting_down", kind=KServeError, **unavailable):
            await client.infer("tiny.tokens", TOKENS)


async def test_another_gateway_answers_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE_S", 0.1)
    first, second = Model(held=True), Model()
    async with served(second) as (other, _), AsyncExitStack() as stack:
        async with served(first) as (one, _):
            address = f"ipv4:127.0.0.1:{one.grpc_port},127.0.0.1:{other.grpc_port}"
            client = await stack.enter_async_context(KServeClient(address))
            asking = asyncio.create_task(client.infer("echo", [NUMBERS], budget_ns=10**11))
            await until(lambda: first.calls)
            assert await one.drain(0) is False, "it is under way"
        answer = await asking
    np.testing.assert_array_equal(answer.output("x"), NUMBERS.data)
    (before,), (after,) = first.calls, second.calls
    budgets = [each.request.parameters["timeout_ns"] for each in (before, after)]
    assert budgets[0] > budgets[1] > 0
