"""Stages of layers as processes: what a model over them does is what it does on one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.config import EngineConfig
from nano_inference.stages.executor.facts import facts_of_model, report_ranks
from nano_inference.stages.executor.runner.ranks.group import RankError

from .....pipeline import short_model
from .....soaking import in_soak
from ...driver.speculation.drafting import DraftingLane, Row
from ...plans import new_sequence, step_plan
from .test_processes import check_adapters, rollouts

CONFIG = EngineConfig(
    model_path=str(short_model.folder((2, 3, 4))),
    dtype="float32",
    max_model_len=256,
    # So few that prompts come in chunks, and blocks that sequences are preempted.
    max_tokens_per_batch=64,
    max_batch_size=16,
    kv_cache_bytes=1 << 20,
    deterministic=True,
    rank_timeout_s=20.0,
)
SHAPES = {"two stages": (2, 1), "two stages of two ranks": (2, 2)}


# Every day tests/pipeline/test_pipeline_parallel.py has two stages alone.
@pytest.fixture(scope="module", params=[in_soak("two stages"), "two stages of two ranks"])
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def alone(shape: tuple[int, int]) -> Iterator[InferenceEngine]:
    # Stages alone change no bits.
    with InferenceEngine(replace(CONFIG, rank_invariant=shape[1] > 1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def spread(shape: tuple[int, int], alone: InferenceEngine) -> Iterator[InferenceEngine]:
    stages, width = shape
    more = {"pipeline_parallel": stages, "tensor_parallel": width, "rank_invariant": width > 1}
    with InferenceEngine(replace(CONFIG, **more)) as engine:
        yield engine


def vectors(engine: InferenceEngine) -> list[list[float]]:
    prompts = ["a prompt", "another one, longer", [7] * 90]
    return [
        each.tolist() for kind in ("last", "mean") for each in engine.embed(prompts, pooling=kind)
    ]


def test_every_number_is_that_of_one_rank(alone: InferenceEngine, spread: InferenceEngine) -> None:
    assert rollouts(spread) == rollouts(alone)
    assert vectors(spread) == vectors(alone)


def test_new_weights_and_memory(alone: InferenceEngine, spread: InferenceEngine) -> None:
    """Each stage takes its layers, and both ends theirs of the tied embedding."""
    before = rollouts(alone)
    shards = spread._executor.model.shards
    assert shards is not None
    generator = torch.Generator().manual_seed(5)
    new = {
        name: torch.randn(shard.shape, generator=generator) * 0.02
        for name, shard in shards.shards.items()
        if name != "lm_head.weight"  # it is the embedding's
    }
    for engine in (alone, spread):
        engine.update_weights(new, blocking=True)
    assert rollouts(spread) == rollouts(alone) != before
    for engine in (alone, spread):
        engine.release_memory()
        engine.resume_memory()
        engine.update_weights(new, blocking=True)
    after = rollouts(spread)
    assert after == rollouts(alone)
    assert after[0].weight_version == 2


def test_adapters_are_those_of_one_rank(alone: InferenceEngine, spread: InferenceEngine) -> None:
    check_adapters(alone, spread)


def test_a_rank_has_its_layers_only(
    alone: InferenceEngine, spread: InferenceEngine, shape: tuple[int, int]
) -> None:
    stages, width = shape
    reports = report_ranks(spread._executor)
    whole = report_ranks(alone._executor) or [None]
    assert len(reports) == stages * width
    facts, one = facts_of_model(spread._executor), facts_of_model(alone._executor)
    assert facts["parameters"] == one["parameters"]
    # Three layers: two in the first stage.
    assert facts["stage_layers"] == "2+1"
    assert reports[0].kv == 2 * reports[-1].kv
    for report in reports:
        assert report.weights < 0.8 * int(one["weight_bytes"]) / width
    assert whole
    assert spread._executor.capacity().pipeline_stages == stages


def run_lane(engine: InferenceEngine, ahead: int) -> tuple[dict[int, list[Row]], DraftingLane]:
    engine._executor.reset()
    lane = DraftingLane(CONFIG, engine._executor, steps_ahead=ahead, preempt_every=9)
    for seq_id in range(1, 13):
        sampling = SamplingParams(
            temperature=float(seq_id % 2),
            max_tokens=4 + seq_id,
            logprobs=seq_id % 3,
            prompt_logprobs=0 if seq_id % 5 == 0 else None,
            repetition_penalty=1.3 if seq_id % 4 == 0 else 1.0,
            ignore_eos=seq_id % 2 == 0,
        )
        lane.add(seq_id, sampling, [3 + seq_id % 4] * (seq_id * 11 % 90 + 1))
    return lane.run(), lane


def test_steps_in_flight_equal_one_rank(alone: InferenceEngine, spread: InferenceEngine) -> None:
    found, lane = run_lane(spread, 2)
    assert lane.most_in_flight >= 2
    expected, other = run_lane(alone, 1)
    assert found == expected
    assert lane.prompts == other.prompts


def test_the_first_stage_computes_while_the_second_is_behind(
    alone: InferenceEngine, spread: InferenceEngine
) -> None:
    """With the second stage stopped, two plans are launched: a launch waits for no other stage."""
    core = spread._executor
    assert core.ranks is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    plans = [
        step_plan(
            number,
            new=(new_sequence(number, [9, 8, number], [4 * number], sampling),),
            rows={number: 3},
        )
        for number in (1, 2)
    ]
    drop = step_plan(3, finished=(1,))
    results = []
    core.reset()
    for pid in core.ranks.pids[-1:]:
        os.kill(pid, signal.SIGSTOP)
        try:
            launched = [core.launch(plan) for plan in plans]
            # A sequence that a later plan drops keeps its place until its step is finished.
            launched.append(core.launch(drop))
        finally:
            os.kill(pid, signal.SIGCONT)
        results = [core.finish(step) for step in launched]
    assert [result.seq_ids for result in results] == [(1,), (2,), ()]
    other = alone._executor
    other.reset()
    expected = [other.execute(plan) for plan in plans]
    assert [(each.token_ids, each.logprobs) for each in results[:2]] == [
        (each.token_ids, each.logprobs) for each in expected
    ]
    assert core._table.row_of(1) is None


def test_steps_from_before_a_reset_are_drained(spread: InferenceEngine) -> None:
    core = spread._executor
    core.reset()
    sampling = SamplingParams(temperature=0.0, max_tokens=4)

    def plan(step_id: int) -> list[object]:
        new = (new_sequence(step_id, [9, 8, step_id], [4], sampling),)
        return [core.launch(step_plan(step_id, new=new, rows={step_id: 3}))]

    (lost,) = plan(1)
    (late,) = plan(2)
    core.reset()
    (current,) = plan(3)
    assert core.finish(late).seq_ids == ()
    assert core.finish(current).seq_ids == (3,)
    assert core.finish(lost).seq_ids == ()


def test_a_rank_that_ends_is_an_error_of_the_engine() -> None:
    """Rank 1 is the second stage."""
    with InferenceEngine(replace(CONFIG, pipeline_parallel=2)) as engine:
        ranks = engine._executor.ranks
        assert ranks is not None
        (pid,) = ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1"):
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))
    assert not os.path.exists(f"/proc/{pid}")
