"""The loss is GRPO's: right alignment, right gradient, clipped on the rollout's own logprobs."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpo_trainer import (
    Batch,
    Group,
    Trainer,
    TrainerProcess,
    TrainerSettings,
    pack,
    policy_loss,
    token_logprobs,
)

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample

SETTINGS = TrainerSettings(model_folder=EngineConfig().model_folder, steps=4, warmup=0)


def sample(prompt: tuple[int, ...], completion: tuple[int, ...], logprob: float) -> TrainingSample:
    logprobs = (logprob,) * len(completion)
    return TrainingSample(prompt, completion, logprobs, None, 0, finish_reason="stop")


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Three prompts of different lengths, four samples each, every other one rewarded."""
    params = SamplingParams(max_tokens=6, seed=3)
    with InferenceEngine(EngineConfig(dtype="float32")) as engine:
        found = engine.generate(["98 + 25 =", "4 + 11 =", "What is 7 + 77?"], params, 4)
    rewards = (1.0, 0.0, 1.0, 0.0)
    return [Group(tuple(found[at : at + 4]), rewards) for at in range(0, 12, 4)]


def test_advantages_are_relative_to_the_group() -> None:
    group = Group((sample((1,), (2,), 0.0),) * 4, (1.0, 0.0, 0.0, 0.0))
    assert group.informative
    best, *others = group.advantages()
    assert best == pytest.approx(3**0.5, rel=1e-4)
    assert others == pytest.approx([-(3**-0.5)] * 3, rel=1e-4)
    equal = replace(group, rewards=(1.0,) * 4)
    assert not equal.informative
    assert equal.advantages() == [0.0] * 4


def test_a_batch_names_the_places_where_the_next_token_was_sampled() -> None:
    short, long = sample((1, 2, 3), (4, 5), -0.5), sample((6,), (7, 8, 9), -0.25)
    batch = pack([Group((short, long), (0.0, 1.0))])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    assert batch.learn.int().tolist() == [[0, 0, 1, 1], [1, 1, 1, 0]]
    assert batch.behaviour.tolist() == [[0, 0, -0.5, -0.5], [-0.25, -0.25, -0.25, 0]]
    assert batch.advantages[:, 0].tolist() == pytest.approx([-1, 1], rel=1e-4)


def test_equal_samples_share_a_row_and_count_as_before() -> None:
    right, wrong = sample((1, 2), (3, 4), -0.5), sample((1, 2), (5,), -2.0)
    batch = pack([Group((right, wrong, right, right), (1.0, 0.0, 1.0, 1.0))])
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 5, 0]]
    assert batch.counts[:, 0].tolist() == [3, 1]
    assert batch.mean(torch.tensor([[9.0, 1.0, 2.0], [9.0, 4.0, 9.0]])).item() == pytest.approx(
        (3 * (1 + 2) + 4) / 7
    )


def test_the_trainer_finds_the_logprobs_that_the_engine_reported(groups: list[Group]) -> None:
    batch = pack(groups)
    with torch.no_grad():
        found = token_logprobs(Trainer(SETTINGS).model, batch, 1.0)
    sampled = sum(len(sample.logprobs) for group in groups for sample in group.samples)
    assert (batch.learn * batch.counts).sum() == sampled
    torch.testing.assert_close(found[batch.learn], batch.behaviour[batch.learn], rtol=0, atol=1e-4)


def batch_of(behaviour: torch.Tensor, advantages: torch.Tensor) -> Batch:
    """A batch that learns wherever there is a logprob."""
    rows, length = behaviour.shape
    tokens = torch.zeros(rows, length + 1, dtype=torch.long)
    return Batch(tokens, behaviour < 0, behaviour, advantages, counts=torch.ones(rows, 1))


def test_on_policy_the_gradient_is_that_of_the_policy_gradient() -> None:
    behaviour = torch.tensor([[-1.0, -2.0], [0.0, -3.0]])
    batch = batch_of(behaviour, torch.tensor([[2.0], [-1.0]]))
    logprobs = batch.behaviour.clone().requires_grad_()
    loss, facts = policy_loss(logprobs, batch, SETTINGS)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2.0, -2.0], [0.0, 1.0]]) / 3)
    assert facts == {"ratio_max": 1.0, "clipped": 0.0, "kl_behaviour": 0.0}


@pytest.mark.parametrize(
    ("advantage", "change", "learns"),
    [(1, 0.1, True), (1, 0.5, False), (1, -0.5, True), (-1, -0.5, False), (-1, 0.5, True)],
)
def test_tokens_beyond_the_clip_range_have_no_gradient(
    advantage: float, change: float, learns: bool
) -> None:
    batch = batch_of(torch.tensor([[-1.0]]), torch.tensor([[float(advantage)]]))
    logprobs = (batch.behaviour + change).requires_grad_()
    policy_loss(logprobs, batch, SETTINGS)[0].backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.any()) is learns


def test_a_step_makes_rewarded_tokens_likelier(groups: list[Group]) -> None:
    trainer = Trainer(SETTINGS)
    batch = pack(groups)

    def gain() -> float:
        with torch.no_grad():
            logprobs = token_logprobs(trainer.model, batch, 1.0)
        return batch.mean(logprobs * batch.advantages).item()

    before = gain()
    facts = trainer.step(groups)
    assert gain() > before
    assert facts["grad_norm"] > 0
    assert trainer.steps == 1


def test_the_reference_holds_the_policy_back(groups: list[Group]) -> None:
    """With a weight that outdoes the rewards, the second step goes back towards the reference."""
    free, held = Trainer(SETTINGS), Trainer(replace(SETTINGS, kl_weight=100.0))
    for trainer in (free, held):
        for _ in range(4):
            facts = trainer.step(groups)
    assert "kl_reference" in facts
    start = Trainer(SETTINGS).model.state_dict()

    def distance(trainer: Trainer) -> float:
        weights = trainer.model.state_dict()
        return sum((weights[name] - start[name]).square().sum().item() for name in start)

    assert distance(held) < distance(free)


def test_a_trainer_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has imported all that it needs to fail."""
    original = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: original("fork"))
    settings = replace(SETTINGS, model_folder=tmp_path)
    with pytest.raises(RuntimeError, match="trainer's process has failed"):
        TrainerProcess(settings, {"weight": torch.zeros(1)}, threads=1)
