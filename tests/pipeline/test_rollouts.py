"""The contract between trainers and engines, held by ours and usable by others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from nano_inference import InferenceEngine, RolloutEngine, SamplingParams, TrainingSample

METHODS = ("flush_cache", "generate", "get_weight_version", "shutdown", "update_weights")


class FakeEngine:
    """What a trainer's own tests would use."""

    def __init__(self) -> None:
        self.version = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]:
        return [
            TrainingSample(tuple(prompt), (9,), (-0.5,), None, self.version, "length")
            for prompt in prompts
            for _ in range(num_samples_per_prompt)
        ]

    def update_weights(self, state_dict: Mapping[str, Tensor], blocking: bool = False) -> None:
        self.version += 1

    def get_weight_version(self) -> int:
        return self.version

    def flush_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def train(engine: RolloutEngine, weights: Mapping[str, Tensor]) -> list[TrainingSample]:
    """One round in flight and one in turn, by the contract alone."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    samples = engine.generate([[70, 71], [80]], params, num_samples_per_prompt=2)
    engine.update_weights(weights)
    samples += engine.generate([[70, 71]], [params])
    engine.update_weights(weights, blocking=True)
    engine.flush_cache()
    assert engine.get_weight_version() == 2
    samples += engine.generate([[80]], params)
    engine.shutdown()
    engine.shutdown()
    return samples


@pytest.mark.parametrize("kind", [FakeEngine, InferenceEngine])
def test_a_trainer_written_against_the_contract_runs(kind: type[Any]) -> None:
    engine = kind()
    assert isinstance(engine, RolloutEngine)
    weights = dict(engine.state_dict()) if kind is InferenceEngine else {}
    samples = train(engine, weights)
    prompts = [(70, 71), (70, 71), (80,), (80,), (70, 71), (80,)]
    assert [sample.prompt_tokens for sample in samples] == prompts
    assert [sample.weight_version for sample in samples] == [0, 0, 0, 0, 1, 2]
    assert all(len(sample.logprobs) == len(sample.completion_tokens) for sample in samples)


def test_a_class_without_a_method_does_not_fulfil_the_contract() -> None:
    assert not isinstance(SamplingParams(), RolloutEngine)
    assert sorted(name for name in vars(RolloutEngine) if name[0] != "_") == list(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_s_signatures_match_the_contract(method: str) -> None:
    """By the same names, in the same order, and nothing more that is needed."""
    wanted = inspect.signature(getattr(RolloutEngine, method)).parameters
    ours = inspect.signature(getattr(InferenceEngine, method)).parameters
    assert list(ours)[: len(wanted)] == list(wanted)
    for name, parameter in wanted.items():
        if parameter.default is not parameter.empty:
            assert ours[name].default == parameter.default
    for name in ours.keys() - wanted.keys():
        assert ours[name].default is not inspect.Parameter.empty
