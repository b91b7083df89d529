"""Keys and values in int8 and fp8: the same bits however they come into the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.stages.batching.parts.tiers.part import Tiers

from . import short_model

SHORT_MODEL = True
SAMPLED = SamplingParams(temperature=1, max_tokens=6, seed=3, ignore_eos=True)


def prompts_of(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    common = [draw.randrange(40, 120) for _ in range(40)]
    lengths = (100, 3, 47, 60, 90, 100)
    return [common + [draw.randrange(40, 120) for _ in range(length)] for length in lengths]


def engine(kv_dtype: str, **settings: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {
        "model_path": str(short_model.folder()),
        "dtype": "float32" if kv_dtype == "int8" else "bfloat16",
        "kv_dtype": kv_dtype,
        "max_model_len": 160,
        "max_batch_size": 8,
        "deterministic": True,
    }
    return InferenceEngine(EngineConfig(**defaults | settings))


def bits_of(samples: list[TrainingSample]) -> list[tuple[Any, ...]]:
    return [(sample.completion_tokens, sample.logprobs) for sample in samples]


def bytes_for(kv_dtype: str, blocks: int) -> int:
    with engine(kv_dtype) as made:
        return made._executor.cache.token_bytes * 16 * blocks


def fetched(made: InferenceEngine) -> tuple[int, int]:
    tiers = made._batching.part(Tiers).blocks
    assert tiers is not None
    counts = tiers.take_counts()
    return counts.fetched, counts.loaded


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_bits_are_the_same_however_keys_and_values_come_into_the_cache(
    kv_dtype: str, tmp_path: Path
) -> None:
    """Alone and in a crowd, with a shared prefill, in chunks, preempted, cached, from the host and
    from disk; and not with another KV dtype."""
    prompts, others = prompts_of(0), prompts_of(1)
    few = {"kv_cache_bytes": bytes_for(kv_dtype, 12), "max_batch_size": 4}
    with engine(kv_dtype) as made:
        expected = [bits_of(made.generate([prompt], SAMPLED, 2)) for prompt in prompts]
        crowd = bits_of(made.generate(prompts, SAMPLED, 2))
        assert made._executor.cache.codes is not None
    flat = [bits for of_prompt in expected for bits in of_prompt]
    assert crowd == flat
    with engine(kv_dtype, max_tokens_per_batch=16, block_size=4) as made:
        assert bits_of(made.generate(prompts, SAMPLED, 2)) == flat
    with engine(kv_dtype, kv_host_bytes=1 << 20, **few) as made:
        for _ in range(2):
            assert bits_of(made.generate(prompts, SAMPLED, 2)) == flat
        assert fetched(made)[1] > 0
        assert made._batching.take_counters().preemptions > 0
    disk = {"kv_disk_path": str(tmp_path), **few}
    with engine(kv_dtype, **disk) as made:
        made.generate([*prompts, *others], SAMPLED)
        assert made._tiers is not None
        made._batching.receive(made._tiers.blocks.on_disk(), 0)
    with engine(kv_dtype, **disk) as made:
        assert bits_of(made.generate(prompts, SAMPLED, 2)) == flat
        assert fetched(made)[0] > 0
    for other in {"auto", "int8", "fp8"} - {kv_dtype}:
        dtype = "float32" if kv_dtype == "int8" else "bfloat16"
        with engine(other, dtype=dtype, kv_disk_path=str(tmp_path)) as made:
            made.generate(prompts[:1], SAMPLED)
            assert fetched(made) == (0, 0)
