"""All bits of 32 requests at once, wherever their KV comes from, with tiers too small for it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from nano_inference import Config, Pipeline
from nano_inference.stages.batching.tiers import TierCounts

from ..stages.executor.runner.adapters.making import make_adapter
from . import reference, short_model
from .builders import State, until
from .conftest import MakeConfig
from .test_replicas import batching_of, fairness_of
from .test_roles import answers, written

SHORT_MODEL = True
REQUESTS = 32

SMALL = {
    "max_model_len": 160,
    "max_batch_size": REQUESTS,
    "kv_cache_bytes": 1_000_000,  # about 120 blocks, and the prompts have 200
    "deterministic": True,
    "speculation": "auto",
    "kv_audit_every": 3,
}
TIERS = {"kv_host_bytes": 500_000, "kv_disk_bytes": 1_000_000}


def config_of(make_config: MakeConfig, roles: list[str] | None = None, **engine: Any) -> Config:
    settings = {f"engine__{name}": value for name, value in (SMALL | engine).items()}
    if roles:
        settings |= {"pipeline__replicas": len(roles), "pipeline__roles": roles}
    return make_config(**settings)


def requests() -> list[dict[str, Any]]:
    """Greedy, seeded, constrained, of an adapter; with one sample and with two; many of them begin
    as another does."""
    draw = random.Random(9)
    beginnings = [[draw.randrange(40, 120) for _ in range(48)] for _ in range(5)]
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
        ending = [draw.randrange(40, 120) for _ in range(draw.randrange(20, 70))]
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
        tiers = batching_of(self._pipeline, self._replica).tiers
        assert tiers is not None
        return tiers._counts

    async def audited(self) -> None:
        await until(lambda: self.counts.audited > 0)
        assert self.counts.different == 0


async def test_all_bits_are_the_same_wherever_kv_comes_from(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    model = reference.model(short_model.folder())
    for seed in (1, 2):
        make_adapter(model, seed, tmp_path / str(seed))
    same, other = (
        written({name: tensor * factor for name, tensor in loaded.items()}, tmp_path / name)
        for name, factor in (("same", 1.0), ("other", 1.25))
    )

    async def load(pipeline: Pipeline, seed: int) -> None:
        await pipeline.client.load_adapter("a", str(tmp_path / str(seed)))

    async with Pipeline(config_of(make_config)) as cold:
        await load(cold, 1)
        expected = await answers(cold, ASKED)
        await load(cold, 2)
        await cold.client.flush_cache()
        of_two = await answers(cold, ASKED)
        await cold.client.update_weights(other)
        of_other = await answers(cold, ASKED)
    assert sum(map(len, expected)) == 40
    differing = [one != two for one, two in zip(expected, of_two, strict=True)]
    assert differing == [body.get("model") == "a" for body in ASKED]

    async def check(pipeline: Pipeline) -> None:
        """Whatever changes meanwhile."""
        await load(pipeline, 1)
        for _ in range(2):
            assert await answers(pipeline, ASKED) == expected
        await load(pipeline, 2)
        assert await answers(pipeline, ASKED) == of_two
        await pipeline.client.update_weights(other)
        assert await answers(pipeline, ASKED) == of_other
        await pipeline.client.update_weights(same)
        assert await answers(pipeline, ASKED) == of_two
        await load(pipeline, 1)
        running = asyncio.create_task(answers(pipeline, ASKED))
        await until(lambda: batching_of(pipeline, 0).load()["running"] > 0)
        await pipeline.client.flush_cache()
        assert await running == expected
        assert await answers(pipeline, ASKED) == expected

    folder = str(tmp_path / "kv")
    async with Pipeline(config_of(make_config, **TIERS, kv_disk_path=folder)) as pipeline:
        await load(pipeline, 1)
        assert await answers(pipeline, ASKED) == expected
        watch = Watch(pipeline)
        await until(lambda: watch.counts.stored > 0)
        await check(pipeline)
        await watch.audited()
        assert watch.counts.loaded > 0
        tiers = batching_of(pipeline, 0).load()
        assert tiers["kv_host"] == tiers["kv_host_total"], "blocks have left host memory"
    async with Pipeline(config_of(make_config, **TIERS, kv_disk_path=folder)) as pipeline:
        await load(pipeline, 1)
        assert await answers(pipeline, ASKED) == expected
    # All of the disk was of updated weights; now it is of those that were loaded.
    async with Pipeline(config_of(make_config, **TIERS, kv_disk_path=folder)) as pipeline:
        await load(pipeline, 1)
        assert await answers(pipeline, ASKED) == expected
        watch = Watch(pipeline)
        await watch.audited()
        assert watch.counts.fetched > 0
    async with Pipeline(config_of(make_config, ["prefill", "decode"], **TIERS)) as pipeline:
        await check(pipeline)
        watch = Watch(pipeline, 1)
        await watch.audited()
        assert watch.counts.received > 0
        assert fairness_of(pipeline)._core.counts.handovers > 0
