"""Logprobs of given token ids at positions of prompts: equal cold, warm and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.bus.public import TokenLogprob
from nano_inference.pipeline.rollouts import TrainingSample

from . import reference, short_model

PROMPT = tuple(20 + 7 * place % 300 for place in range(61))
TARGETS = [[9, 30, 9], [], [-1], [700, -1, 5], *([[place] for place in range(55)]), []]


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(
        model_path=str(short_model.folder()), dtype="float32", max_tokens_per_batch=24
    )
    with InferenceEngine(config) as engine:
        yield engine


def scored(engine: InferenceEngine, number: int = 1, **asked: Any) -> TrainingSample:
    params = SamplingParams(max_tokens=2, temperature=0, **asked)
    first, *_ = engine.generate([PROMPT], params, number)
    return first


def test_targets_have_the_logprobs_that_the_likeliest_tokens_have(engine: InferenceEngine) -> None:
    all_tops = scored(engine, prompt_logprobs=100).prompt_top_logprobs
    assert all_tops is not None
    tops: list[tuple[TokenLogprob, ...]] = [each[::33] for each in all_tops[1:]]
    wanted = [[top.token_id for top in each] for each in tops]
    engine.flush_cache()
    (found,) = engine.score_targets([PROMPT], [wanted])
    assert found.tolist() == [[top.logprob for top in each] for each in tops]


def test_cold_warm_partial_and_for_several_samples_they_are_equal(engine: InferenceEngine) -> None:
    engine.flush_cache()
    cold = scored(engine, prompt_logprob_token_ids=TARGETS).prompt_token_id_logprobs
    warm = scored(engine, 3, prompt_logprob_token_ids=TARGETS).prompt_token_id_logprobs
    assert cold is not None
    assert warm is not None
    assert cold.shape == (60, 3)
    assert (cold[0, 0] == cold[0, 2]) & np.isneginf(cold[1:3]).all() & np.isneginf(cold[3, 1])
    assert warm.tobytes() == cold.tobytes()
    (late,) = engine.score_targets([PROMPT], [np.array([[place] for place in range(55)] + [[-1]])])
    assert late[:55, 0].tobytes() == cold[4:59, 0].tobytes()


def test_logprobs_that_begin_later_are_those_of_all(engine: InferenceEngine) -> None:
    engine.flush_cache()
    every, later = (scored(engine, prompt_logprobs=2, prompt_logprob_start=at) for at in (0, 40))
    assert every.prompt_logprobs is not None
    assert later.prompt_logprobs == (None,) * 41 + every.prompt_logprobs[41:]
    assert later.prompt_top_logprobs is not None
    assert later.prompt_top_logprobs[41:] == (every.prompt_top_logprobs or ())[41:]


def test_ranks_are_places_among_all_tokens(engine: InferenceEngine) -> None:
    sample = scored(engine, prompt_logprobs=1)
    wanted = [range(reference.model().config.vocab_size)] * 2
    (found,) = engine.score_targets([PROMPT], [[*map(list, wanted)]])
    for place, logprobs in zip((-2, -1), found, strict=True):
        rank = 1 + int((logprobs > logprobs[PROMPT[place]]).sum())
        assert (sample.prompt_token_ranks or ())[place] == rank
