"""All bits of 32 requests at once, wherever their KV comes from, with tiers too small for it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from nano_inference import Config, Pipeline
from nano_inference.stages.batching.parts.tiers.tiers import TierCounts

from ..stages.executor.runner.adapters.making import make_adapter
from . import reference, short_model
from .builders import State, until
from .conftest import MakeConfig
from .test_replicas import batching_of, fairness_of
from .test_roles import answers, written

SHORT_MODEL = True
REQUESTS = 32

SMALL = {
    "max_model_len": 128,
    "max_batch_size": REQUESTS,
    "kv_cache_bytes": 700_000,  # about 85 blocks, and the prompts have 150
    "deterministic": True,
    "speculation": "auto",
    "kv_audit_every": 1,
}
TIERS = {"kv_host_bytes": 400_000, "kv_disk_bytes": 1_000_000}


def config_of(make_config: MakeConfig, roles: list[str] | None = None, **engine: Any) -> Config:
    settings = {f"engine__{name}": value for name, value in (SMALL | engine).items()}
    if roles:
        settings |= {"pipeline__replicas": len(roles), "pipeline__roles": roles}
    return make_config(**settings)


def requests() -> list[dict[str, Any]]:
    """Greedy, seeded, constrained, of an adapter; with one sample and with two; many of them begin
    as another does."""
    draw = random.Random(9)
    beginnings = [[draw.randrange(40, 120) for _ in range(40)] for _ in range(5)]
    asked: list[dict[str, Any]] = []
    for index in range(REQUESTS):
        sampling: dict[str, Any] = {
            "temperature": float(index % 3 > 0),
            "seed": index,
            "max_tokens": draw.randrange(3, 9),
            "ignore_eos": True,
            "logprobs": 2,
        }
        if index % 5 == 4:
            sampling |= {"constraint": {"regex": "[0-9]{2,9} [a-z]{2,30}"}, "ignore_eos": False}
        ending = [draw.randrange(40, 120) for _ in range(draw.randrange(10, 40))]
        body = {
            "prompt_token_ids": beginnings[index % len(beginnings)] + ending,
            "n": 1 + (index % 4 == 3),
            "sampling": sampling,
        }
        asked.append(body | ({"model": "a"} if index % 6 == 5 else {}))
    return asked


ASKED = requests()


class Watch:
    """What a pipeline's tiers have done so far."""

    def __init__(self, pipeline: Pipeline, replica: int = 0) -> None:
        self._pipeline, self._replica = pipeline, replica

    @property
    def counts(self) -> TierCounts:
        tiers = batching_of(self._pipeline, self._replica).part("tiers").blocks
        assert tiers is not None
        return tiers._counts

    async def audited(self) -> None:
        await until(lambda: self.counts.audited > 0)
        assert self.counts.different == 0


class Changes:
    """What changes while requests run, and the bits of each state, computed without tiers."""

    def __init__(self, make_config: MakeConfig, loaded: State, folder: Path) -> None:
        model = reference.model(short_model.folder())
        for seed in (1, 2):
            make_adapter(model, seed, folder / str(seed))
        self._same, self._other = (
            written({name: tensor * factor for name, tensor in loaded.items()}, folder / name)
            for name, factor in (("same", 1.0), ("other", 1.25))
        )
        self._make_config, self._folder = make_config, folder
        self.expected: list[list[Any]] = []

    async def load(self, pipeline: Pipeline, seed: int) -> None:
        """Load an adapter under the name of the other one."""
        await pipeline.client.load_adapter("a", str(self._folder / str(seed)))

    async def compute(self) -> None:
        async with Pipeline(config_of(self._make_config)) as cold:
            await self.load(cold, 1)
            self.expected = await answers(cold, ASKED)
            await self.load(cold, 2)
            await cold.client.flush_cache()
            self._of_two = await answers(cold, ASKED)
            await cold.client.update_weights(self._other)
            self._of_other = await answers(cold, ASKED)
        assert sum(map(len, self.expected)) == 40
        pairs = zip(self.expected, self._of_two, strict=True)
        assert [one != two for one, two in pairs] == [body.get("model") == "a" for body in ASKED]

    async def check(self, pipeline: Pipeline) -> None:
        """All bits in each state."""
        await self.load(pipeline, 1)
        assert await answers(pipeline, ASKED) == self.expected
        await self.load(pipeline, 2)
        assert await answers(pipeline, ASKED) == self._of_two
        await pipeline.client.update_weights(self._other)
        assert await answers(pipeline, ASKED) == self._of_other
        await pipeline.client.update_weights(self._same)
        assert await answers(pipeline, ASKED) == self._of_two
        await self.load(pipeline, 1)
        running = asyncio.create_task(answers(pipeline, ASKED))
        await until(lambda: batching_of(pipeline, 0).load()["running"] > 0)
        await pipeline.client.flush_cache()
        assert await running == self.expected
        assert await answers(pipeline, ASKED) == self.expected


async def test_all_bits_are_the_same_from_host_memory_and_disk(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    changes = Changes(make_config, loaded, tmp_path)
    await changes.compute()
    config = config_of(make_config, **TIERS, kv_disk_path=str(tmp_path / "kv"))
    async with Pipeline(config) as pipeline:
        await changes.load(pipeline, 1)
        assert await answers(pipeline, ASKED) == changes.expected
    async with Pipeline(config) as pipeline:
        await changes.load(pipeline, 1)
        assert await answers(pipeline, ASKED) == changes.expected
        watch = Watch(pipeline)
        assert watch.counts.fetched > 0
        await watch.audited()
        await changes.check(pipeline)
        assert watch.counts.loaded > watch.counts.fetched
        host_slots = batching_of(pipeline, 0).load()["kv_host_total"]
        assert watch.counts.stored > 2 * host_slots, "blocks have left host memory"
        assert watch.counts.different == 0


@pytest.mark.soak(only=True)
async def test_all_bits_are_the_same_after_a_transfer(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    """In all states; test_roles.py has new weights, adapters, features and short caches apart."""
    changes = Changes(make_config, loaded, tmp_path)
    await changes.compute()
    async with Pipeline(config_of(make_config, ["prefill", "decode"], **TIERS)) as pipeline:
        await changes.check(pipeline)
        watch = Watch(pipeline, 1)
        await watch.audited()
        assert watch.counts.received > 0
        assert fairness_of(pipeline)._core.counts.handovers > 0
