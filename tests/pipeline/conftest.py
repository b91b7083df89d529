"""The whole pipeline on the bundled model, over each kind of bus."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from nano_inference.bus.steps import NewSequence, StepPlan, StepResult
from nano_inference.config import Config, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.parts.tiers import Tiers

from ..soaking import in_soak
from . import reference, short_model
from .builders import DTYPE, State

MakeConfig = Callable[..., Config]

BUSES = ("memory", "redis-links")

# Of each test that is not slow; the slow ones have limits of their own.
LIMIT_S = 120


# What a bus promises is held for each kind in tests/bus/, and most of what stages do with it is no
# other for the kind: that is shown in memory, which is what tests get that ask for nothing else.
# Nothing on Redis, and every link on Redis: for what depends on when messages arrive, or on what
# becomes of them on their way. Every day that is in memory, or what is given here: stories of
# tests/simulation/ have every link on Redis, with faults of all kinds.
def both_buses(every_day: str = "memory") -> pytest.MarkDecorator:
    """A test on each bus."""
    buses = [bus if bus == every_day else in_soak(bus) for bus in BUSES]
    return pytest.mark.parametrize("make_config", buses, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder that hang fail. (A limit that a fixture sets would end with its set-up,
    which is a task of its own.)"""
    here = Path(__file__).parent
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.path.parent == here
            and iscoroutinefunction(item.obj)
            and not item.get_closest_marker("slow")
        ):
            item.obj = _limited(item.obj)


def _limited(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(*args, **kwargs)

    return limited


@pytest.fixture(scope="session", autouse=True)
def loading_beats_computing() -> Iterator[None]:
    """Blocks are loaded from tiers where that is faster by measured times, which would be chance
    with models as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tiers, "_measure_token_ns", lambda part: 1_000_000_000)
        yield


def config_maker(request: pytest.FixtureRequest) -> MakeConfig:
    """Builds configurations for the bus that the fixture was asked for, on keys of its own; with
    the short model in a module that has `SHORT_MODEL`."""
    bus: dict[str, object] = {"engine.dtype": "float32"}
    if getattr(request.module, "SHORT_MODEL", False):
        bus["engine.model_path"] = str(short_model.folder())
    if request.param != "memory":
        name = "cluster_url" if request.param == "cluster" else "redis_url"
        bus["bus.url"] = request.getfixturevalue(name)
        bus["bus.prefix"] = f"test-{uuid.uuid4().hex[:12]}"
        bus["bus.links"] = "auto" if request.param == "redis" else "redis"

    def make(**overrides: object) -> Config:
        settings = {name.replace("__", "."): value for name, value in overrides.items()}
        return load_config(env={}, overrides={**bus, **settings})

    return make


@pytest.fixture(params=["memory"])
def make_config(request: pytest.FixtureRequest) -> MakeConfig:
    """For tests that start their own pipelines."""
    return config_maker(request)


@pytest.fixture
async def pipeline(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    """A pipeline with all five stages here, for one test alone."""
    async with Pipeline(make_config()) as running:
        yield running


@pytest.fixture
async def running(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    """A pipeline in bfloat16: weights spell the same tokens, and steps take a third of the time."""
    config = make_config(pipeline__restart_backoff_s=0.01, engine__dtype=DTYPE)
    async with Pipeline(config) as pipeline:
        yield pipeline


@pytest.fixture
async def exact(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    """A pipeline whose tokens are compared with those of Transformers."""
    config = make_config(pipeline__restart_backoff_s=0.01)
    async with Pipeline(config) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> State:
    """The weights of the model that the module's pipelines load."""
    short = getattr(request.module, "SHORT_MODEL", False)
    model = reference.model(short_model.folder()) if short else reference.model()
    return dict(model.state_dict())


@pytest_asyncio.fixture(params=["memory"], scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Pipeline]:
    """A pipeline for all tests of a module, which must run in the module's event loop."""
    async with Pipeline(config_maker(request)()) as running:
        yield running


@pytest.fixture
async def http(pipeline: Pipeline) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of the pipeline."""
    async with (
        Gateway(pipeline.client, pipeline.config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The URL of a gateway in front of a pipeline, with the module's `SETTINGS`."""
    config = load_config(env={}, overrides=getattr(request.module, "SETTINGS", {}))
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        yield gateway.url


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[NewSequence]:
    """The sequences that executors start after tokens which were generated before, so far."""
    found: list[NewSequence] = []
    original = ExecutorCore.execute

    def execute(self: ExecutorCore, plan: StepPlan) -> StepResult:
        found.extend(new for new in plan.new if new.num_generated)
        return original(self, plan)

    monkeypatch.setattr(ExecutorCore, "execute", execute)
    return found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step of any executor, so far."""
    found: list[int] = []
    original = ExecutorCore.execute

    def execute(self: ExecutorCore, plan: StepPlan) -> StepResult:
        found.append(len(plan.seq_ids))
        return original(self, plan)

    monkeypatch.setattr(ExecutorCore, "execute", execute)
    return found
