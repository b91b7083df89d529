"""Ranks that share quantised layers have the codes of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor.runner.interface import make_runner
from nano_inference.stages.executor.runner.model import load_model
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from ...refusals import needs_kernels
from .models import (
    NUM_BLOCKS,
    config_of,
    hash_of,
    logits_of,
    make_batches,
    make_whole_model,
    run_ranks,
    save,
)
from .test_weights import update

SIZES = {"intermediate_size": 128, "hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32}
CODES: dict[str, Any] = {"quantization": "int4", "quantization_group": 32}


def settings(folder: Path, size: int, **more: Any) -> EngineConfig:
    config: EngineConfig = config_of(folder, size, **{**CODES, **more})
    return config


def test_one_two_and_four_ranks_have_the_same_bits(tmp_path: Path) -> None:
    """And after an update those of ranks that were started with the new weights."""
    needs_kernels(torch.float32)
    folders = [save("qwen2", tmp_path / str(seed), seed=seed, **SIZES) for seed in range(2)]
    batches, exact = make_batches(2), {"invariant": True}
    wanted = {
        size: hash_of(run_ranks(settings(folders[1], size, **exact), size, batches))
        for size in (1, 2, 4)
    }
    assert len({*wanted.values()}) == 1
    new = dict(make_whole_model("qwen2", seed=1, **SIZES).state_dict())
    found = run_ranks(
        settings(folders[0], 2, **exact), 2, batches, lambda *each: update(new, *each)
    )
    assert hash_of(found) == wanted[2]


def test_codes_are_those_of_one_process(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path, seed=0)
    batches = make_batches(2)
    config = settings(folder, 2, deterministic=False)
    alone = make_runner(config, load_model(config), NUM_BLOCKS)
    for found, expected in zip(
        run_ranks(config, 2, batches), logits_of(alone, batches), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "group", "change"),
    [("llama", 0, r"quantization_group to"), ("qwen3_moe", 32, r"tensor_parallel to 1")],
)
def test_what_ranks_can_not_share_is_refused(
    name: str, group: int, change: str, tmp_path: Path
) -> None:
    codes = {"quantization": "int8", "quantization_group": group}
    config = settings(save(name, tmp_path, **SIZES), 1, invariant=True, **codes)
    with pytest.raises(ModelError, match=change):
        load_sharded(config, OneRank())
