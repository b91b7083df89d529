"""KV events of pipelines: a router that follows the stream has what the caches hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nano_inference import BusClient, EngineConfig, InferenceEngine, Pipeline
from nano_inference.bus.kv_events import KVEventEntry, encode_batch
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import BusError, ConfigError
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.batching.parts.kv_events import wire_hash
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.stage import BatchingStage

from ..kv_router import PLAIN, Root, Router
from ..soaking import in_soak
from ..stages.batching.events import on_device
from . import short_model
from .builders import raises, stage_of, until
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
SIZE = 16
SMALL = {
    "engine__max_model_len": 256,
    "engine__max_batch_size": 4,
    "engine__kv_cache_bytes": 200_000,
    "engine__kv_events": True,
    "pipeline__restart_backoff_s": 0.01,
}


class Followed:
    """The entries of a pipeline's stream, and a router's index for each replica."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.entries: list[KVEventEntry] = []
        self.routers: dict[int, Router] = {}

    async def follow(self, entries: AsyncIterator[KVEventEntry]) -> None:
        async for entry in entries:
            self.entries.append(entry)
            router = self.routers.setdefault(entry.replica, Router())
            router.apply(encode_batch(entry.batch))

    def core(self, replica: int = 0) -> BatchingCore | None:
        return stage_of(self.pipeline, BatchingStage, replica)._core

    def agrees(self, replica: int = 0) -> bool:
        """Whether the router has the blocks of the replica's cache, which is idle."""
        core = self.core(replica)
        if core is None or not core.idle or replica not in self.routers:
            return False
        return self.routers[replica].where.get("GPU", set()) == on_device(core.cache)

    def known(self, token_ids: list[int], root: Root = PLAIN, replica: int = 0) -> int:
        """Leading blocks that the router finds on the device."""
        media = self.routers[replica].find(token_ids, SIZE, root)
        return next((i for i, each in enumerate(media) if "GPU" not in each), len(media))


@asynccontextmanager
async def followed(pipeline: Pipeline) -> AsyncIterator[Followed]:
    """Follow a pipeline's stream from its first entry on."""
    followed = Followed(pipeline)
    stream = await pipeline.client.kv_events(kept=True)
    task = asyncio.create_task(followed.follow(stream))
    try:
        yield followed
    finally:
        await stream.aclose()
        await task


def prompt(number: int, tokens: int = 64) -> list[int]:
    return [40 + number, *range(50, 50 + tokens - 1)]


async def ask(pipeline: Pipeline, token_ids: list[int], **fields: Any) -> None:
    sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    body = {"prompt_token_ids": token_ids, "sampling": sampling, **fields}
    completion = await pipeline.client.complete(body)
    assert completion.status == "done", completion.error


@both_buses()
# What either cache tells is held in tests/stages/batching/test_kv_events.py.
@pytest.mark.parametrize("cache_type", [in_soak("paged"), "radix"])
async def test_a_router_has_the_blocks_of_the_cache(
    make_config: MakeConfig, cache_type: str
) -> None:
    """After hits, evictions, a flush and new weights."""
    config = make_config(**SMALL, engine__cache_type=cache_type)
    async with Pipeline(config) as pipeline, followed(pipeline) as seen:
        for number in range(20):
            await ask(pipeline, prompt(number % 7, 48 + number))
        await until(seen.agrees)
        assert seen.known(prompt(19 % 7, 67)) == 4
        router = seen.routers[0]
        assert router.cleared == 1
        await pipeline.client.flush_cache()
        await until(lambda: router.cleared == 2)
        await ask(pipeline, prompt(1))
        await until(lambda: seen.agrees() and seen.known(prompt(1)) == 4)
        await pipeline.client.update_weights(FolderWeights(str(short_model.folder())))
        await until(lambda: router.cleared == 3)
        assert not router.where
        await ask(pipeline, prompt(1))
        await until(lambda: seen.agrees() and seen.known(prompt(1)) == 4)
        entries = seen.entries
    assert [each.sequence for each in entries] == list(range(len(entries)))
    assert {each.missed for each in entries} == {0}
    sources = {
        (each.model, each.lane, each.replica, each.batch.data_parallel_rank) for each in entries
    }
    assert sources == {("", "0", 0, 0)}


async def test_replicas_share_the_stream(make_config: MakeConfig) -> None:
    config = make_config(**SMALL | {"engine__max_batch_size": 1}, pipeline__replicas=2)
    async with Pipeline(config) as pipeline, followed(pipeline) as seen:
        await asyncio.gather(*(ask(pipeline, prompt(number)) for number in range(6)))
        await until(lambda: seen.agrees(0) and seen.agrees(1))
        known = [[seen.known(prompt(i), replica=r) for i in range(6)] for r in (0, 1)]
    assert all(4 in each for each in known)
    assert {each.batch.data_parallel_rank for each in seen.entries} == {0, 1}
    assert {each.missed for each in seen.entries} == {0}


async def test_replicas_with_roles_report_their_own_blocks(make_config: MakeConfig) -> None:
    """The one that decodes has the prompt's blocks, too: in host memory and on its device."""
    roles = {"pipeline__replicas": 2, "pipeline__roles": ["prefill", "decode"]}
    config = make_config(**SMALL, **roles, engine__deterministic=True)
    async with Pipeline(config) as pipeline, followed(pipeline) as seen:
        await asyncio.gather(*(ask(pipeline, prompt(number)) for number in range(3)))
        await until(lambda: seen.agrees(0) and seen.agrees(1))
        for replica in (0, 1):
            await until(
                lambda r=replica: [seen.known(prompt(i), replica=r) for i in range(3)] == [4] * 3
            )  # type: ignore[misc]
        for replica, router in seen.routers.items():
            core = seen.core(replica)
            assert core is not None
            on_host = set(map(wire_hash, core.part(Tiers).blocks._slot_of))
            assert router.where.get("CPU", set()) == on_host
        assert seen.routers[1].where["CPU"]


async def test_a_stream_that_takes_nothing_delays_no_request(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees what was lost by the sequence."""
    async with Pipeline(make_config(**SMALL)) as pipeline, followed(pipeline) as seen:
        await ask(pipeline, prompt(1))
        await until(seen.agrees)
        last = seen.entries[-1].sequence
        original = pipeline.bus.kv_events.publish

        async def refuse(entry: KVEventEntry) -> bool:
            if entry.sequence % 2:
                raise BusError("the bus can't take it")
            return False

        with monkeypatch.context() as patch:
            patch.setattr(pipeline.bus.kv_events, "publish", refuse)
            await ask(pipeline, prompt(2))
            await ask(pipeline, prompt(3))
        assert pipeline.bus.kv_events.publish == original
        await ask(pipeline, prompt(4))
        await until(lambda: seen.entries[-1].sequence > last)
        gap = next(each for each in seen.entries if each.sequence > last)
    assert gap.missed == gap.sequence - last - 1 >= 2


def test_the_engine_refuses_events() -> None:
    with raises("invalid_config", "engine.kv_events needs a bus", ConfigError):
        InferenceEngine(EngineConfig(kv_events=True))


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_a_pipeline_that_ends_clears_its_blocks(make_config: MakeConfig) -> None:
    config = make_config(**SMALL)
    async with Pipeline(config) as pipeline:
        await ask(pipeline, prompt(1))
    async with BusClient.connect(config.bus) as client:
        stream, router = await client.kv_events(kept=True), Router()
        while router.cleared < 2:
            router.apply(encode_batch((await anext(stream)).batch))
        await stream.aclose()
    assert not router.where
