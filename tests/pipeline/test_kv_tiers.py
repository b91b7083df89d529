"""Tokens are the same whether KV was computed, or comes from host memory or disk."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import (
    Completion,
    EngineConfig,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    TrainingSample,
)
from nano_inference.config import WeightsError
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import TierCounts
from nano_inference.stages.executor.core import ExecutorCore

from . import short_model
from .builders import break_once
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# About 24 blocks of 16 tokens: room for three of the prompts.
SMALL = {"max_model_len": 128, "max_batch_size": 4, "kv_cache_bytes": 200_000}
PROMPT_TOKENS = 100


def prompts_of(seed: int, number: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(40, 120) for _ in range(PROMPT_TOKENS)] for _ in range(number)]


PROMPTS = prompts_of(0)


def engine(**settings: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {"model_path": str(short_model.folder()), "dtype": "float32"}
    return InferenceEngine(EngineConfig(**defaults | SMALL | settings))


def tokens_of(samples: list[TrainingSample]) -> list[tuple[int, ...]]:
    return [sample.completion_tokens for sample in samples]


def counts(made: InferenceEngine) -> TierCounts:
    tiers = made._batching.part(Tiers).blocks
    assert tiers is not None
    return tiers.take_counts()


def wait_for_writes(made: InferenceEngine) -> None:
    assert made._tiers is not None
    tiers = made._tiers.blocks
    made._batching.receive(tiers.on_disk(), 0)


@pytest.fixture(scope="module")
def computed() -> Iterator[list[tuple[int, ...]]]:
    with engine() as made:
        yield tokens_of(made.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_kv_from_host_memory_gives_the_same_tokens(
    cache_type: str, computed: list[tuple[int, ...]]
) -> None:
    with engine(cache_type=cache_type, kv_host_bytes=1 << 20) as made:
        for _ in range(3):
            assert tokens_of(made.generate(PROMPTS, GREEDY)) == computed
        assert counts(made).loaded > 2 * 5 * (PROMPT_TOKENS // 16)


def test_kv_from_disk_gives_the_same_tokens_after_a_restart(
    tmp_path: Path, computed: list[tuple[int, ...]]
) -> None:
    with engine(kv_disk_path=str(tmp_path)) as made:
        made.generate([*PROMPTS, *prompts_of(1)], GREEDY)
        wait_for_writes(made)
    with engine(kv_disk_path=str(tmp_path)) as made:
        samples = made.generate(PROMPTS, GREEDY)
        found = counts(made)
    assert tokens_of(samples) == computed
    assert found.fetched > 5 * (PROMPT_TOKENS // 16)
    assert found.lost == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"rms_norm_eps": 0.01},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]},
    ],
    ids=["rope_theta", "yarn", "eps", "window"],
)
def test_another_configuration_of_the_same_weights_finds_no_stored_kv(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    folder, disk = tmp_path / "model", str(tmp_path / "kv")
    shutil.copytree(short_model.folder(), folder)
    with engine(model_path=str(folder), kv_disk_path=disk) as made:
        made.generate(PROMPTS[:2], GREEDY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with engine(model_path=str(folder)) as made:
        expected = tokens_of(made.generate(PROMPTS[:2], GREEDY))
    with engine(model_path=str(folder), kv_disk_path=disk) as made:
        assert tokens_of(made.generate(PROMPTS[:2], GREEDY)) == expected
        assert counts(made).fetched == 0


def test_siblings_constraints_and_drafts_go_on_from_stored_kv() -> None:
    """n > 1 shares a prefill after loaded blocks; sampled tokens depend on (seed, position)."""
    params = SamplingParams(temperature=1, max_tokens=6, seed=3, ignore_eos=True)
    with engine() as made:
        expected = tokens_of(made.generate(PROMPTS, params, 3))
    with engine(kv_host_bytes=1 << 20, speculation="auto") as made:
        for _ in range(2):
            assert tokens_of(made.generate(PROMPTS, params, 3)) == expected
        assert counts(made).loaded


def bits_of(samples: list[TrainingSample]) -> list[tuple[Any, ...]]:
    return [(sample.completion_tokens, sample.logprobs) for sample in samples]


DETERMINISTIC = {"deterministic": True, "kv_audit_every": 1, "max_batch_size": 4}


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_in_deterministic_mode_all_bits_are_the_same(cache_type: str, tmp_path: Path) -> None:
    """Logprobs too; each loaded block is computed again, and is equal."""
    params = [
        SamplingParams(temperature=index % 2, max_tokens=6, seed=index, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    settings: dict[str, Any] = {"cache_type": cache_type, **DETERMINISTIC}
    with engine(**settings) as made:
        expected = bits_of(made.generate(PROMPTS, params, 2))
    with engine(**settings, kv_disk_path=str(tmp_path), kv_host_bytes=1 << 20) as made:
        for _ in range(3):
            assert bits_of(made.generate(PROMPTS, params, 2)) == expected
        wait_for_writes(made)
        found = counts(made)
    assert found.audited > 10
    assert found.different == 0
    with engine(**settings, kv_disk_path=str(tmp_path)) as made:
        assert bits_of(made.generate(PROMPTS, params, 2)) == expected
        found = counts(made)
    assert found.fetched > 0
    assert found.audited > 0
    assert found.different == 0


def test_the_audit_finds_a_flipped_bit_and_turns_the_tiers_off() -> None:
    with engine(**DETERMINISTIC, kv_host_bytes=1 << 20) as made:
        expected = tokens_of(made.generate(PROMPTS, GREEDY))
        assert made._tiers is not None
        tiers = made._tiers.blocks
        tiers.slots.memory[:, 3] ^= 1
        made.generate(PROMPTS, GREEDY)
        made.generate(PROMPTS[:1], GREEDY)
        assert counts(made).different
        made.generate(PROMPTS, GREEDY)
        made.generate(PROMPTS, GREEDY)
        found = counts(made)
        assert (found.stored, found.loaded) == (0, 0)
        made.flush_cache()
        for _ in range(2):
            assert tokens_of(made.generate(PROMPTS, GREEDY)) == expected
        assert counts(made).loaded


def test_a_shutdown_leaves_weights_that_wait(tmp_path: Path) -> None:
    """Their memory may be free by then, and they would be refused."""
    made = engine(kv_disk_path=str(tmp_path))
    made.generate(PROMPTS[:1], GREEDY)
    weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made.update_weights(weights)
    for tensor in weights.values():
        tensor.untyped_storage().resize_(0)
    refused = False
    try:
        made.shutdown()
    except WeightsError:  # its traceback would show the tensors
        refused = True
    assert not refused


@both_buses()
async def test_a_pipeline_finds_its_blocks_after_a_restart_and_a_failure(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a failure of either stage that shares the tiers."""
    config = make_config(
        engine__kv_disk_path=str(tmp_path),
        pipeline__restart_backoff_s=0.01,
        **{f"engine__{name}": value for name, value in SMALL.items()},
    )

    async def run(pipeline: Pipeline, prompts: list[list[int]]) -> list[Completion]:
        sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        return [
            await pipeline.client.complete({"prompt_token_ids": prompt, "sampling": sampling})
            for prompt in prompts
        ]

    def texts(completions: list[Completion]) -> list[str]:
        assert all(each.status == "done" for each in completions), completions
        return [each.samples[0].text for each in completions]

    async with Pipeline(config) as pipeline:
        expected = texts(await run(pipeline, [*PROMPTS, *prompts_of(1)]))[: len(PROMPTS)]
        for owner, method in ((BatchingCore, "absorb"), (ExecutorCore, "execute")):
            with monkeypatch.context() as patch:
                break_once(patch, owner, method, after=9)
                assert texts(await run(pipeline, PROMPTS)) == expected
    async with Pipeline(config) as pipeline:
        completions = await run(pipeline, PROMPTS)
    assert texts(completions) == expected
    assert sum(each.usage.cached_tokens for each in completions) > 4 * 80
