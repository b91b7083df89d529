"""`rank_invariant`: the same bits for 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .....soaking import in_soak
from .models import MODELS, WITH_EXPERTS, config_of, hash_of, make_batches, run_ranks, save

BATCHES = 10
"""Of each model and dtype in `make soak`, more than 200 together; every day three."""

EVERY_DAY = ("llama with biases", "qwen2_moe")


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [in_soak("float32"), "bfloat16"])
def test_one_two_and_four_ranks_give_the_same_bits(dtype: str, tmp_path: Path, soak: bool) -> None:
    for name in MODELS if soak else EVERY_DAY:
        check_bits(name, dtype, tmp_path / name, BATCHES if soak else 3)


def check_bits(name: str, dtype: str, folder: Path, number: int) -> None:
    save(name, folder)
    batches = make_batches(number, seed=len(name))
    hashes = {}
    for size in (1, 2, 4):
        config = config_of(folder, size, invariant=True, dtype=dtype)
        hashes[f"{size} ranks"] = hash_of(run_ranks(config, size, batches))
        if name in WITH_EXPERTS and size > 1:
            config = config_of(folder, size, invariant=True, dtype=dtype, expert_parallel=size)
            hashes[f"{size} ranks, whole experts"] = hash_of(run_ranks(config, size, batches))
    assert len({*hashes.values()}) == 1, hashes
