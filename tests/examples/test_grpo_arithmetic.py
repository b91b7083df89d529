"""Both ways to train go right: rewards, versions, staleness; the final reward is for long runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import grpo_arithmetic
import msgspec
import pytest
import torch
from grpo_arithmetic import (
    NothingToLearn,
    Record,
    Settings,
    Speculation,
    curve,
    engine_config,
    run,
    run_blocking,
    start_trainer,
)
from grpo_rollouts import KINDS, Arithmetic, Rollouts, staleness
from grpo_trainer import Batch, Correction, Group, TrainerSettings, policy_loss
from rich.console import Console

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.parts import speculation

SETTINGS = Settings(steps=3, groups=4, samples=4, prompts=8, held_out=5)


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


def make_rollouts(engine: InferenceEngine, seed: int = 1) -> Rollouts:
    task = Arithmetic(engine.config.model_folder, ("add", "sub"))
    params = SamplingParams(max_tokens=8)
    return Rollouts(engine, task, task.stream(seed), samples=4, params=params, seed=seed)


@pytest.fixture
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(dtype="float32")) as engine:
        yield engine


def test_held_out_problems_are_never_trained_on() -> None:
    task = Arithmetic(EngineConfig().model_folder, tuple(KINDS))

    def operands(text: str) -> tuple[str, ...]:
        words = text.strip("?.=").split()
        (at,) = (place for place, word in enumerate(words) if word in "+-")
        pair = (words[at - 1], words[at + 1])
        return (words[at], *(sorted(pair) if words[at] == "+" else pair))

    seen = {operands(p.example.prompt) for p in itertools.islice(task.stream(1), 5_000)}
    held_out = [operands(p.example.prompt) for p in task.chosen("heldout", 200)]
    assert len(held_out) == 1200
    assert len(seen) > 1_500
    assert not seen & set(held_out)


def test_epochs_go_over_the_same_problems_in_other_orders() -> None:
    task = Arithmetic(EngineConfig().model_folder, ("add", "sub-thinking"))
    problems = [problem.token_ids for problem in itertools.islice(task.epochs(1, 4), 24)]
    first, second, third = problems[:8], problems[8:16], problems[16:]
    assert len(set(first)) == 8
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third


def answer(tokens: tuple[int, ...], reason: Any = "stop") -> TrainingSample:
    return TrainingSample((1,), tokens, (0.0,) * len(tokens), None, 0, finish_reason=reason)


def test_a_reward_is_for_the_whole_answer_and_its_end(engine: InferenceEngine) -> None:
    rollouts = make_rollouts(engine)
    problem = next(rollouts.problems)
    (sample,) = engine.generate([problem.token_ids], SamplingParams(temperature=0, max_tokens=8))
    encode = rollouts.task._tokenizer.encode
    end = sample.completion_tokens[-1]
    right = (*encode(problem.example.answer), end)

    def reward(tokens: tuple[int, ...], reason: str = "stop") -> float:
        return rollouts.task.reward(problem, answer(tokens, reason))

    assert reward(right) == 1.0
    assert reward(right, "length") == 0.0
    assert reward((*right[:-1], right[-2], end)) == 0.0


def test_of_a_thought_its_end_counts_and_not_its_words() -> None:
    task = Arithmetic(EngineConfig().model_folder, ("add-thinking",))
    problem = next(task.stream(1))
    right = problem.example.answer.rpartition("\n")[2]

    def reward(text: str) -> float:
        return task.reward(problem, answer(tuple(task._tokenizer.encode(text))))

    assert task._tokenizer.decode(problem.token_ids).endswith("<think>\n")
    assert reward(problem.example.answer) == reward(f"Hm.\n</think>\n\n{right}") == 1.0
    assert reward(right) == reward(f"{right}\n</think>\n\n0{right}") == 0.0


def test_corrections_weight_the_tokens_of_another_policy() -> None:
    """Ratios of 3, 1.1 and 1/2 to the rollout's policy; the advantage is 1."""
    ratios = torch.tensor([[3.0, 1.1, 0.5]])
    ones = torch.ones(1, 3)
    batch = Batch(ones, ones.bool(), -ratios.log(), ones[:, :1], ones[:, :1])
    found: dict[Correction, list[float]] = {}
    for correction in get_args(Correction):
        logprobs = torch.zeros(1, 3, requires_grad=True)
        settings = TrainerSettings(Path(), 1, correction=correction)
        loss, facts = policy_loss(logprobs, batch, settings)
        loss.backward()
        found[correction] = (-3 * logprobs.grad[0]).tolist()  # type: ignore[index]
        assert facts["ratio_max"] == pytest.approx(3)
    assert found["none"] == pytest.approx([1, 1, 1])
    assert found["truncated"] == pytest.approx([2, 1.1, 0.5])
    assert found["ratio"] == pytest.approx([0, 1.1, 0.5])


def test_staleness_is_counted_by_the_token() -> None:
    sample = TrainingSample(
        (1,), (2, 3, 4), (0.0,) * 3, None, 4, finish_reason="stop", weight_versions=((4, 0), (6, 2))
    )
    assert staleness([Group((sample,), (1.0,))], version=7) == [3, 3, 1]


def test_an_update_in_flight_reaches_sequences_that_are_under_way(engine: InferenceEngine) -> None:
    rollouts = make_rollouts(engine)
    groups: list[Group] = []
    for step in range(12):
        if step == 3:
            engine.update_weights(
                {name: weight * 1.01 for name, weight in engine.state_dict().items()}
            )
        groups += rollouts.step(concurrency=6)
    versions = {sample.weight_versions for group in groups for sample in group.samples}
    assert {((0, 0),), ((1, 0),)} < versions
    mixed = [each for each in versions if len(each) == 2]
    assert mixed
    assert all(first == (0, 0) and version == 1 for first, (version, _) in mixed)
    assert rollouts.counts.groups == len(groups)


def weights_of(engine: InferenceEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.state_dict().items()}


def blocking(seed: int) -> tuple[Record, dict[str, torch.Tensor], int]:
    settings = replace(SETTINGS, seed=seed)
    record = Record()
    with InferenceEngine(EngineConfig(dtype="float32", seed=seed)) as engine:
        before, rollouts = weights_of(engine), make_rollouts(engine, seed)
        with start_trainer(settings, engine) as trainer:
            run_blocking(settings, rollouts, trainer, record, record.facts.append)
        after = weights_of(engine)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return record, after, engine.get_weight_version()


def test_blocking_mode_is_repeatable_bit_for_bit() -> None:
    record, weights, version = blocking(seed=1)
    again, same, _ = blocking(seed=1)
    assert version == len(record.facts) == 3
    assert record.facts == again.facts
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert [each[2] for each in record.ages] == [0, 0, 0]
    assert record.mixed == 0
    other, different, _ = blocking(seed=2)
    assert other.facts != record.facts
    assert any(not torch.equal(weights[name], different[name]) for name in weights)


def thinking(speculation: Speculation) -> tuple[Record, list[TrainingSample], dict[str, Any]]:
    """Two steps over the same four problems: the record, all samples and the last weights."""
    sizes = {"steps": 2, "problems": 2, "prompts": 4, "batch": 6, "max_tokens": 40}
    kinds = ("add-thinking", "sub-thinking")
    settings = replace(SETTINGS, kinds=kinds, speculation=speculation, deterministic=True, **sizes)
    record, samples = Record(), list[TrainingSample]()
    with InferenceEngine(engine_config(settings)) as engine:
        rollouts = grpo_arithmetic.make_rollouts(settings, engine)
        generated = rollouts.batch

        def batch(size: int) -> list[Group]:
            groups = generated(size)
            samples.extend(sample for group in groups for sample in group.samples)
            return groups

        rollouts.batch = batch  # type: ignore[method-assign]
        with start_trainer(settings, engine) as trainer:
            run_blocking(settings, rollouts, trainer, record, record.facts.append)
        return record, samples, weights_of(engine)


@pytest.mark.soak(only=True)
def test_speculation_changes_no_bit_of_a_blocking_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step takes as long with many rows as with few, so whatever is likely enough is verified.
    alike = StepCosts((1, 64), (0.001, 0.001))
    monkeypatch.setattr(speculation.Speculation, "_measure_costs", lambda core: alike)
    record, samples, weights = thinking("off")
    again, same, equal = thinking("auto")
    assert record.facts == again.facts
    assert record.ages == again.ages
    assert all(torch.equal(weights[name], equal[name]) for name in weights)
    assert not any(sample.num_draft_tokens for sample in samples)
    drafted = sum(sample.num_draft_tokens for sample in same)
    assert 0 < sum(sample.num_accepted_draft_tokens for sample in same) <= drafted
    none = {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
    assert samples == [msgspec.structs.replace(sample, **none) for sample in same]


@pytest.mark.soak(only=True)
def test_ranks_change_no_bit_of_a_blocking_run() -> None:
    """Rewards, losses and weights are the same."""
    settings = replace(SETTINGS, steps=2, deterministic=True)
    found = []
    for ranks in (1, 2):
        own, record = replace(settings, ranks=ranks), Record()
        with (
            InferenceEngine(engine_config(own)) as engine,
            start_trainer(own, engine) as trainer,
        ):
            rollouts = grpo_arithmetic.make_rollouts(own, engine)
            run_blocking(own, rollouts, trainer, record, record.facts.append)
            found.append((record.facts, trainer.weights()))
    (facts, weights), (same, equal) = found
    assert facts == same
    assert all(torch.equal(weights[name], equal[name]) for name in weights)


def test_nothing_to_learn_ends_the_run(console: Console) -> None:
    """Nearly greedy, all samples of a prompt are alike."""
    with pytest.raises(NothingToLearn):
        run(replace(SETTINGS, temperature=0.0001, most_prompts=8), console)


def check_figures(found: dict[str, Any]) -> None:
    assert len(found["rewards"]) == 3
    assert all(0 <= each <= 1 for each in (*found["rewards"], found["before"], found["after"]))
    assert found["groups_trained_on"] == 12
    assert found["weight_version"] == 3
    assert found["groups"] >= 12
    assert 0 < found["generating"] <= 1
    assert 0 < found["training"] <= 1
    assert found["drafted_tokens"] == found["accepted_tokens"] == 0
    assert found["rollout_tokens_per_s"] >= found["tokens_per_s"] > 0


def test_a_blocking_run_reports_its_work(console: Console) -> None:
    found = run(SETTINGS, console)
    check_figures(found)
    assert found["staleness_max"] == 0
    assert found["samples_of_several_versions"] == 0
    assert found["generating"] + found["training"] <= 1


@pytest.mark.soak(only=True)
def test_in_flight_run_generates_while_it_trains(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[tuple[Rollouts, Record]] = []
    loop = grpo_arithmetic.run_in_flight

    def watched(settings: Settings, rollouts: Rollouts, trainer: Any, record: Record, report: Any):
        records.append((rollouts, record))
        loop(settings, rollouts, trainer, record, report)

    monkeypatch.setattr(grpo_arithmetic, "run_in_flight", watched)
    found = run(replace(SETTINGS, mode="in-flight"), console)
    check_figures(found)
    ((rollouts, record),) = records
    assert rollouts.engine is not None
    assert found["staleness_max"] >= 0
    assert all(total >= 0 for _, total, _ in record.ages)
    for (_, ended), (started, _) in itertools.pairwise(record.training):
        assert ended <= started
    # While each training step ran, the engine was called.
    for start, end in record.training:
        assert any(start < first and last < end for first, last in rollouts.busy)


def test_the_curve_shows_where_the_rewards_are() -> None:
    *rows, axis = curve([0.0] * 5 + [1.0] * 5, height=4).split("\n")
    assert [row.split("|")[1] for row in rows] == ["     " + "█" * 5] * 4
    assert "10 steps" in axis
