"""Replicas with roles: one computes prompts, another continues with their KV, bit for bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from nano_inference import Completion, Config, Pipeline
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import ConfigError
from nano_inference.stages.batching.cache import KVCacheManager
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.handover import Handovers
from nano_inference.stages.batching.tiers import TierCounts
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.runner.tiers.host_slots import HostSlots
from nano_inference.stages.fairness.core import FairnessCore
from nano_inference.stages.fairness.parts.handovers import Handovers as FairnessHandovers
from nano_inference.stages.streaming.core import StreamingCore

from ..soaking import in_soak
from ..stages.executor.runner.adapters.making import make_adapter
from . import reference, short_model
from .builders import State, break_once, end_of, until
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


def written(weights: State, folder: Path) -> FolderWeights:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return FolderWeights(str(folder))


def counts(pipeline: Pipeline, replica: int) -> TierCounts:
    tiers = batching_of(pipeline, replica).tiers
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
        # Prompts are computed in one replica only, but for the tokens behind their full blocks.
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
async def test_features_go_on_behind_a_handover(make_config: MakeConfig, speculation: str) -> None:
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


async def test_a_short_cache_where_sequences_decode(make_config: MakeConfig) -> None:
    """They are preempted there, and go on there."""
    asked = bodies(10)
    for body in asked:
        body["sampling"]["max_tokens"] = 40
    expected = await expected_of(make_config, asked)
    small = {"engine__max_model_len": 400, "engine__kv_cache_bytes": 600_000}
    async with Pipeline(with_roles(make_config, **small)) as pipeline:
        assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("owner", "method"),
    # Every day those of a handover; tests/pipeline/test_life.py has stages that fail at any time.
    [
        in_soak(BatchingCore, "absorb"),
        in_soak(BatchingCore, "plan"),
        (Handovers, "offer"),
        in_soak(KVCacheManager, "expect"),
        (BatchingCore, "take_in"),
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


async def test_cancelled_requests_leave_nothing_behind(make_config: MakeConfig) -> None:
    async with Pipeline(with_roles(make_config)) as pipeline:
        for attempt in range(4):
            streams = [
                pipeline.submit({**body, "request_id": f"{attempt}-{index}", "stream": True})
                for index, body in enumerate(bodies(4))
            ]
            reads = [asyncio.create_task(end_of(stream)) for stream in streams]
            await asyncio.sleep(0.01 * (attempt % 4))
            for index in range(4):
                await pipeline.client.cancel(f"{attempt}-{index}")
            ends = await asyncio.gather(*reads)
            assert {each.status for each in ends} <= {"done", "cancelled"}
        await check_at_rest(pipeline)
        for replica in range(2):
            tiers = batching_of(pipeline, replica).tiers
            assert tiers is not None
            await until(lambda tiers=tiers: not tiers.has_offers)  # type: ignore[misc]


async def test_new_weights_and_a_flush_while_sequences_are_handed_over(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    asked = bodies(8)
    expected = await expected_of(make_config, asked)
    same, other = (
        written({name: tensor * factor for name, tensor in loaded.items()}, tmp_path / name)
        for name, factor in (("same", 1.0), ("other", 1.25))
    )
    async with Pipeline(with_roles(make_config)) as pipeline:
        for in_flight in ("keep", "retract"):
            running = asyncio.create_task(answers(pipeline, asked))
            await asyncio.sleep(0.05)
            await pipeline.client.update_weights(same, in_flight=in_flight)
            await pipeline.client.flush_cache()
            assert await running == expected
        await pipeline.client.update_weights(other)
        changed = await answers(pipeline, asked)
        await pipeline.client.update_weights(same)
        assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)
    async with Pipeline(make_config(engine__deterministic=True)) as alone:
        await alone.client.update_weights(other)
        assert await answers(alone, asked) == changed != expected


async def test_an_adapter_that_is_loaded_again_meets_no_older_kv(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    asked = bodies(4, model="a")
    model = reference.model(short_model.folder())
    for seed in (1, 2):
        make_adapter(model, seed, tmp_path / str(seed))
    expected = []
    for seed in (1, 2):
        async with Pipeline(make_config(engine__deterministic=True)) as alone:
            await alone.client.load_adapter("a", str(tmp_path / str(seed)))
            expected.append(await answers(alone, asked))
    async with Pipeline(with_roles(make_config)) as pipeline:
        for seed in (1, 2, 1):
            await pipeline.client.load_adapter("a", str(tmp_path / str(seed)))
            assert await answers(pipeline, asked) == expected[seed - 1]
        assert counts(pipeline, 1).received > 0


async def test_roles_change_while_requests_run(make_config: MakeConfig) -> None:
    asked = bodies(8)
    expected = await expected_of(make_config, asked)
    async with Pipeline(with_roles(make_config)) as pipeline:
        running = asyncio.create_task(answers(pipeline, asked))
        for roles in (("decode", "prefill"), ("both", "both"), ("prefill", "both"), ()):
            await asyncio.sleep(0.03)
            await pipeline.client.update_roles(roles)  # type: ignore[arg-type]
            assert fairness_of(pipeline)._core.part(FairnessHandovers).roles == roles
        assert await running == expected
        with pytest.raises(ConfigError, match="no replica to decode"):
            await pipeline.client.update_roles(("prefill", "prefill"))
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
