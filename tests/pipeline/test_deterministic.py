"""Deterministic mode in an engine and in a pipeline whose stages fail, on a model of one layer.

stages/executor/runner/test_deterministic.py has all architectures and arrangements of steps.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import pytest

from nano_inference import Completion, GenerateRequest, InferenceEngine, Pipeline
from nano_inference.bus.steps import NewSequence
from nano_inference.config import EngineConfig, SamplingParams, load_config

from . import short_model
from .builders import until
from .conftest import LIMIT_S
from .test_replicas import break_once, core_of, epoch_of, lanes_of

CONFIG = EngineConfig(
    model_path=str(short_model.folder()), dtype="float32", max_model_len=256, deterministic=True
)


@cache
def wishes() -> tuple[GenerateRequest, ...]:
    """Half of them behind one of two long beginnings; greedy, sampled, and limited ones."""
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


@pytest.mark.slow
async def test_restarts_replays_and_replicas_change_nothing(
    monkeypatch: pytest.MonkeyPatch, resumed: list[NewSequence]
) -> None:
    """Both replicas work, in chunks and with few blocks, so that sequences are preempted; an
    executor fails, all goes on elsewhere, then a batching stage fails."""
    engine = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
    settings = {"pipeline.replicas": 1, "pipeline.restart_backoff_s": 0.01}
    settings |= {f"engine.{name}": value for name, value in engine.items()}
    async with asyncio.timeout(LIMIT_S), Pipeline(load_config(env={}, overrides=settings)) as alone:
        expected = [told(await alone.complete(wish)) for wish in wishes()]
    # 512 bytes per token: of what the sequences of a replica need, the cache holds a part.
    few: dict[str, Any] = {"engine.kv_cache_bytes": 512 * 256, "engine.max_tokens_per_batch": 64}
    settings |= few | {"engine.max_batch_size": 16, "pipeline.replicas": 2}
    config = load_config(env={}, overrides=settings)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await until(lambda: len(lanes_of(pipeline)) == 2)
        before = epoch_of(pipeline)
        break_once(monkeypatch, core_of(pipeline, "executor"), "execute", after=5)
        break_once(monkeypatch, core_of(pipeline, "batching.1"), "absorb", after=9)
        completions = await asyncio.gather(*map(pipeline.complete, wishes()))
        assert epoch_of(pipeline) >= before + 2, "both have failed"
    assert [told(completion) for completion in completions] == expected
    assert len(resumed) > len(wishes()), "most went on behind tokens that they had, some twice"
