"""The response cache of the engine for Python callers."""

from __future__ import annotations

from typing import Any

import msgspec

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample

from . import short_model
from .builders import finish

SHORT_MODEL = True


def engine(**settings: Any) -> InferenceEngine:
    own: dict[str, Any] = {
        "model_path": str(short_model.folder()),
        "dtype": "float32",
        "deterministic": True,
        "response_cache_bytes": 1 << 20,
    }
    return InferenceEngine(EngineConfig(**own | settings))


PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9]]


def unmarked(samples: list[TrainingSample]) -> list[TrainingSample]:
    return [msgspec.structs.replace(each, from_response_cache=False) for each in samples]


def are_served(samples: list[TrainingSample]) -> list[bool]:
    return [sample.from_response_cache for sample in samples]


def test_the_engine_serves_equal_samples_without_a_step(steps: list[int]) -> None:
    with engine() as made:
        first = made.generate(PROMPTS, PARAMS, 2)
        before = sum(steps)
        second = made.generate(PROMPTS, PARAMS, 2)
        assert sum(steps) == before
        assert (are_served(first), are_served(second)) == ([False] * 4, [True] * 4)
        assert unmarked(second) == first
        mixed = made.generate([PROMPTS[0], [1, 2]], PARAMS, 2)
        assert are_served(mixed) == [True, True, False, False]
        assert unmarked(mixed[:2]) == first[:2]


def test_the_engine_serves_step_by_step() -> None:
    with engine() as made:
        (before,) = made.generate([PROMPTS[0]], PARAMS)
        made.add_request([1, 2, 3], PARAMS, request_id="computed")
        made.add_request(PROMPTS[0], PARAMS, request_id="served")
        assert made.has_pending()
        assert made.abort("served") == [], "it has ended"
        samples = finish(made)
        assert {each.request_id: each.from_response_cache for each in samples} == {
            "computed": False,
            "served": True,
        }
        (again,) = (each for each in samples if each.from_response_cache)
        assert again.completion_tokens == before.completion_tokens
        made.add_request(PROMPTS[0], PARAMS, request_id="served")
        assert [each.request_id for each in made.step()] == ["served"], "the id was free again"
        assert not made.has_pending()


def test_the_engine_scores_served_samples_with_its_reference_model() -> None:
    with engine(reference_model_path=str(short_model.folder())) as made:
        first, second = (made.generate(PROMPTS, PARAMS) for _ in range(2))
        assert are_served(second) == [True, True]
        assert all(sample.ref_logprobs for sample in first)
        assert unmarked(second) == first
