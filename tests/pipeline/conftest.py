"""The whole pipeline on the bundled model, over each kind of bus."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from nano_inference.config import Config, load_config
from nano_inference.pipeline.pipeline import Pipeline

MakeConfig = Callable[..., Config]

# All in memory; requests and results on Redis; every link on Redis, or on a cluster.
BUSES = ["memory", "redis", "redis-links", "cluster"]


def config_maker(request: pytest.FixtureRequest) -> MakeConfig:
    """Builds configurations for the bus that the fixture was asked for, on keys of its own."""
    bus: dict[str, object] = {"engine.dtype": "float32"}
    if request.param != "memory":
        name = "cluster_url" if request.param == "cluster" else "redis_url"
        bus["bus.url"] = request.getfixturevalue(name)
        bus["bus.prefix"] = f"test-{uuid.uuid4().hex[:12]}"
        bus["bus.links"] = "auto" if request.param == "redis" else "redis"

    def make(**overrides: object) -> Config:
        settings = {name.replace("__", "."): value for name, value in overrides.items()}
        return load_config(env={}, overrides={**bus, **settings})

    return make


@pytest.fixture(params=BUSES)
def make_config(request: pytest.FixtureRequest) -> MakeConfig:
    """For tests that start their own pipelines."""
    return config_maker(request)


@pytest.fixture
async def pipeline(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    """A pipeline with all five stages here, for one test alone."""
    async with Pipeline(make_config()) as running:
        yield running


@pytest_asyncio.fixture(params=BUSES, scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Pipeline]:
    """A pipeline for all tests of a module, which must run in the module's event loop."""
    async with Pipeline(config_maker(request)()) as running:
        yield running
