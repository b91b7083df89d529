"""A gateway that knows its callers, on an engine that is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nano_inference.config import Config, load_config
from nano_inference.gateway.app import ModelGatewayApp, make_app
from nano_inference.gateway.policy.administration import Administration

from ..fake import FakeEngine


@pytest.fixture
def config() -> Config:
    return load_config(env={}, overrides={"policy.backend": "bus"})


@pytest.fixture
def app(engine: FakeEngine, config: Config) -> ModelGatewayApp:
    return make_app(engine, config)


@pytest.fixture
def administration(app: ModelGatewayApp) -> Administration:
    return Administration(app.policy.store)


@pytest.fixture
async def http(app: ModelGatewayApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


class Made:
    """Makes keys."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    async def __call__(self, *scopes: str, **fields: Any) -> dict[str, Any]:
        """As it is shown once."""
        wish = {"name": "somebody", "scopes": scopes or ("generate",), **fields}
        return await self._administration.create_key(wish)


@pytest.fixture
def made(administration: Administration) -> Made:
    return Made(administration)


def bearer(key: dict[str, Any]) -> dict[str, str]:
    """The header that brings a key."""
    return {"Authorization": f"Bearer {key['key']}"}
