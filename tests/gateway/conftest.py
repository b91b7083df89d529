"""The application on a fake engine, and clients of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest

from nano_inference.config import Config, load_config

from .fake import LIMIT_S, Client, FakeEngine, app_of, http_of, observed


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Limit the time of each asynchronous test: one that hangs fails, and the others run.

    Soaks have limits of their own.
    """
    if inspect.iscoroutinefunction(item.obj) and item.get_closest_marker("soak") is None:
        item.obj = limited(item.obj)


def limited(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(**given: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(**given)

    return run


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    """The settings `SETTINGS` of the test's module."""
    # Most fake engines invent texts that their tokens don't spell.
    usual = {"gateway.max_body_bytes": 4000, "gateway.message_format": "off"}
    return load_config(env={}, overrides=getattr(request.module, "SETTINGS", usual))


@pytest.fixture
async def connected(engine: FakeEngine, config: Config) -> AsyncIterator[dict[str, Any]]:
    """Options of OpenAI's and Anthropic's client libraries, without retries."""
    transport = httpx2.ASGITransport(observed(app_of(engine, config)))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        yield {"api_key": "none", "max_retries": 0, "http_client": http_client}


@pytest.fixture
async def http(engine: FakeEngine, config: Config) -> AsyncIterator[Client]:
    headers = {"Content-Type": "application/json"}
    async with http_of(app_of(engine, config), engine, headers=headers) as client:
        yield client


@pytest.fixture
async def other(engine: FakeEngine, config: Config) -> AsyncIterator[Client]:
    """Another gateway on the same bus."""
    async with http_of(app_of(engine, config)) as client:
        yield client
