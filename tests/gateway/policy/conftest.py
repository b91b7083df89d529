"""A gateway that knows its callers, on an engine that is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from nano_inference.config import Config, load_config
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.policy.administration import Administration

from ..fake import Client, FakeEngine, app_of, http_of


@pytest.fixture
def config() -> Config:
    return load_config(env={}, overrides={"policy.backend": "bus"})


@pytest.fixture
def app(engine: FakeEngine, config: Config) -> GatewayApp:
    return app_of(engine, config)


@pytest.fixture
def administration(app: GatewayApp) -> Administration:
    return Administration(app.policy.store)


@pytest.fixture
async def http(app: GatewayApp, engine: FakeEngine) -> AsyncIterator[Client]:
    async with http_of(app, engine) as client:
        yield client


@dataclass
class Made:
    """Creates keys."""

    administration: Administration

    async def __call__(self, *scopes: str, **fields: Any) -> dict[str, Any]:
        wish = {"name": "somebody", "scopes": scopes or ("generate",), **fields}
        return await self.administration.create_key(wish)


@pytest.fixture
def made(administration: Administration) -> Made:
    return Made(administration)


def bearer(key: dict[str, Any]) -> dict[str, str]:
    """The header with a key."""
    return {"Authorization": f"Bearer {key['key']}"}
