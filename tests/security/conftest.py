"""The gateway's application on an engine that is none, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import httpx
import pytest

from nano_inference.config import load_config
from nano_inference.gateway.app import make_app

from ..gateway.fake import FakeEngine

OpenHttp = Callable[..., httpx.AsyncClient]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def open_http(engine: FakeEngine) -> AsyncIterator[OpenHttp]:
    """Makes a client of an application with these settings, seen from this address."""
    async with AsyncExitStack() as stack:
        app = None

        def opened(address: str = "127.0.0.1", **settings: object) -> httpx.AsyncClient:
            nonlocal app
            if app is None or settings:
                dotted = {name.replace("__", "."): value for name, value in settings.items()}
                app = make_app(engine, load_config(env={}, overrides=dotted))
            transport = httpx.ASGITransport(
                app, raise_app_exceptions=False, client=(address, 12_345)
            )
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=20)
            stack.push_async_exit(client)
            return client

        yield opened


@pytest.fixture
def http(open_http: OpenHttp) -> httpx.AsyncClient:
    return open_http()
