"""`rank_invariant`: the same bits for 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nano_inference.stages.executor.runner.interface import make_runner
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from .....soaking import in_soak
from .models import (
    MODELS,
    NUM_BLOCKS,
    WITH_EXPERTS,
    config_of,
    hash_of,
    logits_of,
    make_batches,
    run_ranks,
    save,
)

BATCHES = 10
"""Batches per model and dtype in `make soak`, more than 200 together; every day three."""

EVERY_DAY = ("qwen2_moe", "ernie4_5_moe")
"""One rank and two agree without experts in the test below, and four in `test_adapters`."""


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [in_soak("float32"), "bfloat16"])
def test_one_two_and_four_ranks_give_the_same_bits(dtype: str, tmp_path: Path, soak: bool) -> None:
    for name in MODELS if soak else EVERY_DAY:
        check_bits(name, dtype, tmp_path / name, soak)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_computes_all_layers_in_one_call(dtype: str, tmp_path: Path) -> None:
    """With the bits of two, which exchange sums between layers."""
    folder = save("llama", tmp_path, attention_bias=True, head_dim=32)
    config = config_of(folder, invariant=True, dtype=dtype)
    model, batches = load_sharded(config, OneRank()), make_batches(3)
    runner = make_runner(config, model, NUM_BLOCKS)
    fast = runner.fast_modules
    assert fast is not None
    # Once layer by layer, and once all together.
    assert fast.count[type(model.base).__name__] == 2
    assert fast.is_whole
    spread = run_ranks(config_of(folder, 2, invariant=True, dtype=dtype), 2, batches)
    assert hash_of(logits_of(runner, batches)) == hash_of(spread)


def check_bits(name: str, dtype: str, folder: Path, soak: bool) -> None:
    save(name, folder)
    batches = make_batches(BATCHES if soak else 3, seed=len(name))
    hashes = {}
    for size in (1, 4) if name in WITH_EXPERTS and not soak else (1, 2, 4):
        config = config_of(folder, size, invariant=True, dtype=dtype)
        hashes[f"{size} ranks"] = hash_of(run_ranks(config, size, batches))
        if name in WITH_EXPERTS and size > 1:
            config = config_of(folder, size, invariant=True, dtype=dtype, expert_parallel=size)
            hashes[f"{size} ranks, whole experts"] = hash_of(run_ranks(config, size, batches))
    assert len({*hashes.values()}) == 1, hashes
