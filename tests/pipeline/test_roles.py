"""Replicas with roles: one computes prompts, another continues with their KV, bit for bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from nano_inference import Completion, Config, Pipeline
from nano_inference.stages.batching.tiers import TierCounts

from .conftest import MakeConfig, both_buses
from .test_replicas import batching_of, check_at_rest

SHORT_MODEL = True
SPLIT = ["prefill", "decode"]


def with_roles(make_config: MakeConfig, roles: list[str] = SPLIT, **settings: Any) -> Config:
    return make_config(
        pipeline__replicas=len(roles),
        pipeline__roles=roles,
        pipeline__restart_backoff_s=0.01,
        engine__deterministic=True,
        engine__kv_audit_every=1,
        **settings,
    )


def bodies(number: int = 12, **fields: Any) -> list[dict[str, Any]]:
    """Greedy and sampled, short and long, with one and several samples."""
    draw = random.Random(5)
    return [
        {
            "prompt_token_ids": [draw.randrange(40, 120) for _ in range(draw.randrange(1, 300))],
            "n": 1 + index % 3,
            "sampling": {
                "temperature": float(index % 2),
                "seed": index,
                "max_tokens": draw.randrange(1, 12),
                "ignore_eos": True,
                "logprobs": 2,
            },
            **fields,
        }
        for index in range(number)
    ]


def bits(completion: Completion) -> list[Any]:
    assert completion.status == "done", completion.error
    return [(s.token_ids, s.logprobs, s.top_logprobs, s.text) for s in completion.samples]


async def answers(pipeline: Pipeline, asked: list[dict[str, Any]]) -> list[list[Any]]:
    return [bits(each) for each in await asyncio.gather(*map(pipeline.complete, asked))]


async def expected_of(make_config: MakeConfig, asked: list[dict[str, Any]]) -> list[list[Any]]:
    async with Pipeline(make_config(engine__deterministic=True)) as alone:
        return await answers(alone, asked)


def counts(pipeline: Pipeline, replica: int) -> TierCounts:
    tiers = batching_of(pipeline, replica).tiers
    assert tiers is not None
    return tiers._counts


@both_buses
async def test_a_handed_over_sequence_has_the_same_bits(make_config: MakeConfig) -> None:
    asked = bodies()
    expected = await expected_of(make_config, asked)
    async with Pipeline(with_roles(make_config)) as pipeline:
        for _ in range(2):
            assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)
        given, taken = counts(pipeline, 0), counts(pipeline, 1)
        assert taken.received > 0
        assert taken.received <= given.offered
        assert (taken.lost, taken.different) == (0, 0)
        # Prompts are computed in one replica only, but for the tokens behind their full blocks.
        done = batching_of(pipeline, 1).take_counters()
        samples = sum(each["n"] for each in asked)
        assert done.prefilled < 2 * 17 * samples
