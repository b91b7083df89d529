"""Replicas with roles: one computes prompts, another continues with their KV, bit for bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nano_inference import Completion, Config, Pipeline
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.parts.handover.arrivals import Arrivals
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers, TierCounts
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.runner.tiers.host_slots import HostSlots
from nano_inference.stages.fairness.core import FairnessCore
from nano_inference.stages.fairness.parts.handovers import Handovers as FairnessHandovers
from nano_inference.stages.streaming.core import StreamingCore

from ..soaking import in_soak
from .builders import break_once, until
from .conftest import MakeConfig, both_buses
from .test_replicas import batching_of, check_at_rest, fairness_of

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


_expected: dict[str, list[list[Any]]] = {}


async def expected_of(make_config: MakeConfig, asked: list[dict[str, Any]]) -> list[list[Any]]:
    """The answers of a pipeline without roles, computed once."""
    if (key := repr(asked)) not in _expected:
        async with Pipeline(make_config(engine__deterministic=True)) as alone:
            _expected[key] = await answers(alone, asked)
    return _expected[key]


def counts(pipeline: Pipeline, replica: int) -> TierCounts:
    tiers = batching_of(pipeline, replica).part(Tiers).blocks
    assert tiers is not None
    return tiers._counts


@both_buses()
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
        # Prompts are computed in one replica only, but for the tokens after their full blocks.
        done = batching_of(pipeline, 1).take_counters()
        samples = sum(each["n"] for each in asked)
        assert done.prefilled < 2 * 17 * samples


async def test_blocks_that_were_received_are_audited(make_config: MakeConfig) -> None:
    async with Pipeline(with_roles(make_config)) as pipeline:
        await answers(pipeline, bodies(4))
        await until(lambda: counts(pipeline, 1).audited > 0)
        assert counts(pipeline, 1).different == 0


FEATURES: dict[str, dict[str, Any]] = {
    "constraint": {"constraint": {"regex": "[0-9]{3,9} [a-z]{2,30}"}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.05},
    "prompt logprobs": {"prompt_logprobs": 1},
    "stop strings": {"stop": ["a", "1"]},
    "least tokens": {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": list(range(30, 90))},
}


@pytest.mark.parametrize("speculation", [in_soak("off"), "auto"])
async def test_features_work_after_a_handover(make_config: MakeConfig, speculation: str) -> None:
    asked = [
        {**body, "sampling": {**body["sampling"], "ignore_eos": False, **feature}}
        for feature in FEATURES.values()
        for body in bodies(4)
    ]
    expected = await expected_of(make_config, asked)
    config = with_roles(make_config, engine__speculation=speculation)
    async with Pipeline(config) as pipeline:
        for number, feature in enumerate(FEATURES):
            some = slice(4 * number, 4 * number + 4)
            before = fairness_of(pipeline)._core.counts.handovers
            assert await answers(pipeline, asked[some]) == expected[some], feature
            assert fairness_of(pipeline)._core.counts.handovers > before, feature
        await check_at_rest(pipeline)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("owner", "method"),
    # Every day those of a handover; tests/pipeline/test_life.py has stages that fail at any time.
    [
        in_soak(BatchingCore, "absorb"),
        in_soak(BatchingCore, "plan"),
        (KVTiers, "offer"),
        in_soak(Tiers, "expect"),
        (Arrivals, "receive"),
        (FairnessHandovers, "left"),
        in_soak(FairnessCore, "pop"),
        in_soak(ExecutorCore, "execute"),
        in_soak(HostSlots, "offer"),
        (HostSlots, "load"),
        in_soak(StreamingCore, "absorb"),
    ],
)
async def test_a_stage_that_fails_in_any_phase_costs_no_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, soak: bool
) -> None:
    asked = bodies(8)
    expected = await expected_of(make_config, asked)
    async with Pipeline(with_roles(make_config)) as pipeline:
        for after in (0, 2, 5) if soak else (0, 5):
            with monkeypatch.context() as patch:
                break_once(patch, owner, method, after=after)
                assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)


async def test_without_shared_slots_the_other_replica_computes_the_prompt(
    make_config: MakeConfig,
) -> None:
    """Roles that come later find executors that offer nothing."""
    asked = bodies(4)
    expected = await expected_of(make_config, asked)
    config = make_config(pipeline__replicas=2, engine__deterministic=True)
    async with Pipeline(config) as pipeline:
        await pipeline.client.update_roles(("prefill", "decode"))
        assert await answers(pipeline, asked) == expected
        assert fairness_of(pipeline)._core.counts.handovers > 0
