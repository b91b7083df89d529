"""Deterministic mode in an engine and in a pipeline whose stages fail, on a model of one layer.

stages/executor/runner/test_deterministic.py has all architectures and arrangements of steps.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from nano_inference import Completion, GenerateRequest, InferenceEngine
from nano_inference.config import EngineConfig, SamplingParams

from . import short_model

CONFIG = EngineConfig(
    model_path=str(short_model.folder()), dtype="float32", max_model_len=256, deterministic=True
)


@cache
def wishes() -> tuple[GenerateRequest, ...]:
    """Half of them after one of two long beginnings; greedy, sampled, and limited ones."""
    rng = random.Random(11)
    beginnings = [[rng.randrange(5, 700) for _ in range(75)] for _ in range(2)]
    made = []
    for index in range(8):
        prompt = [rng.randrange(5, 700) for _ in range(rng.choice([1, 2, 9, 30, 70]))]
        if index % 2:
            prompt = beginnings[index // 2 % 2][: rng.randrange(40, 76)] + prompt
        sampling = SamplingParams(
            temperature=(0.0, 1.0, 0.8)[index % 3],
            top_p=0.9 if index % 3 == 2 else 1.0,
            seed=index,
            max_tokens=24,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if index % 4 == 0 else None,
        )
        made.append(
            GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampling, n=1 + index % 3)
        )
    return tuple(made)


def test_the_engine_takes_the_setting() -> None:
    prompts = [list(wish.prompt_token_ids or ()) for wish in wishes()]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
    with InferenceEngine(CONFIG) as engine:
        together = engine.generate(prompts, sampling)
        apart = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert together == apart
    assert all(sample.top_logprobs and sample.prompt_logprobs for sample in together)


def told(completion: Completion) -> list[Any]:
    """All numbers that a client gets, by sample."""
    samples = [(s.token_ids, s.logprobs, s.top_logprobs) for s in completion.samples]
    return [samples, completion.prompt_logprobs, completion.prompt_top_logprobs]
