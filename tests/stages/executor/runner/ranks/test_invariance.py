"""`rank_invariant`: the same bits for 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .models import MODELS, WITH_EXPERTS, config_of, hash_of, make_batches, run_ranks, save

BATCHES = 10
"""Of each model and dtype; more than 200 together."""

QUICK = ("llama with biases", "qwen2_moe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_one_two_and_four_ranks_give_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    batches = make_batches(BATCHES, seed=len(name))
    hashes = {}
    for size in (1, 2, 4):
        config = config_of(folder, size, invariant=True, dtype=dtype)
        hashes[f"{size} ranks"] = hash_of(run_ranks(config, size, batches))
        if name in WITH_EXPERTS and size > 1:
            config = config_of(folder, size, invariant=True, dtype=dtype, expert_parallel=size)
            hashes[f"{size} ranks, whole experts"] = hash_of(run_ranks(config, size, batches))
    assert len({*hashes.values()}) == 1, hashes
