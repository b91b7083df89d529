"""The gateway's application on an engine that is none, with clients of it; a bus on Redis."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.redis.bus import RedisBus
from nano_inference.config import BusConfig, Config, load_config
from nano_inference.gateway.app import make_app
from nano_inference.stages.admission.core import AdmissionCore

from ..byte_tokenizers import TEMPLATE, byte_tokenizer
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


@pytest_asyncio.fixture
async def redis_bus(redis_url: str) -> AsyncIterator[RedisBus]:
    made = RedisBus(BusConfig(url=redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}"), frozenset())
    yield made
    await made.aclose()


def admission(
    config: Config, tokenizer: PreTrainedTokenizerFast, max_model_len: int, vocab_size: int = 258
) -> AdmissionCore:
    core = AdmissionCore(config, tokenizer, frozenset())
    sizes = {"max_model_len": max_model_len, "vocab_size": vocab_size}
    core.set_capacity(ReplicaCapacity(num_blocks=1 << 20, block_size=16, device="cpu", **sizes))
    return core


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(TEMPLATE)


Write = Callable[[dict[Any, Any]], Awaitable[None]]


@pytest.fixture
def write_entry(redis_bus: RedisBus, redis_url: str) -> Write:
    """Writes an entry of `redis_bus`'s requests, as another program does."""

    async def write(fields: dict[Any, Any]) -> None:
        async with Redis.from_url(redis_url) as redis:
            await redis.xadd(f"{redis_bus._config.prefix}:requests", fields)

    return write


@pytest.fixture
def http(open_http: OpenHttp) -> httpx.AsyncClient:
    return open_http()
