"""Weights that stay in float32 in a model of bfloat16: routers of experts, and their biases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nano_inference.stages.executor.runner.interface import make_runner
from nano_inference.stages.executor.runner.model import load_model
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from .....soaking import in_soak
from .models import (
    NUM_BLOCKS,
    WITH_FLOAT32,
    config_of,
    hash_of,
    logits_of,
    make_batches,
    make_whole_model,
    run_ranks,
)
from .test_pipelining import run_stages, settings

NAMES = [name if name == "ernie4_5_moe" else in_soak(name) for name in WITH_FLOAT32]


def save_biased(name: str, folder: Path) -> Path:
    """A model in which the biases choose the experts, with more bits than bfloat16 has."""
    model = make_whole_model(name)
    for key, tensor in model.state_dict().items():
        if "e_score_correction_bias" in key:
            tensor.copy_(1 + torch.randn(tensor.shape) / 1000)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", WITH_FLOAT32)
def test_a_shard_has_the_dtypes_of_one_process(name: str, tmp_path: Path) -> None:
    config = config_of(save_biased(name, tmp_path), invariant=True, dtype="bfloat16")
    alone = load_model(config).module.state_dict()
    weights = load_sharded(config, OneRank()).shards
    assert weights is not None
    found = weights.read()
    assert {key: each.dtype for key, each in found.items()} == {
        key: each.dtype for key, each in alone.items()
    }
    assert {each.dtype for each in found.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(found[key], each) for key, each in alone.items())


@pytest.mark.parametrize("name", NAMES)
def test_stages_give_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    folder = save_biased(name, tmp_path)
    config = settings(folder, 2, dtype="bfloat16")
    alone = make_runner(config, load_model(config), NUM_BLOCKS)
    assert hash_of(run_stages(config, 2, compares=True)) == hash_of(
        logits_of(alone, make_batches(6))
    )


@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_the_bits_of_one(name: str, tmp_path: Path) -> None:
    folder, batches = save_biased(name, tmp_path), make_batches(3)
    hashes = {
        hash_of(run_ranks(config_of(folder, size, invariant=True, dtype="bfloat16"), size, batches))
        for size in (1, 2)
    }
    assert len(hashes) == 1
