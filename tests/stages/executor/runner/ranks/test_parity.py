"""Logits of several ranks agree with Transformers' model on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.stages.executor import wrap_model
from nano_inference.stages.executor.runner.interface import make_runner

from .....soaking import in_soak
from .models import (
    MODELS,
    NUM_BLOCKS,
    WITH_EXPERTS,
    config_of,
    difference,
    logits_of,
    make_batches,
    make_whole_model,
    run_ranks,
    save,
)

TOLERANCE = 1e-5

EVERY_DAY = ("llama with biases", "gemma2", "olmo2", "phi3", "mixtral")
"""A model for each kind of plan; `make soak` takes all."""


def logits_of_transformers(name: str, dtype: torch.dtype, batches: Any) -> Any:
    """Logits of Transformers' modules, with our attention."""
    module = make_whole_model(name).to(dtype)
    config = config_of(Path(), kernels="off")
    return logits_of(make_runner(config, wrap_model(module, 64), NUM_BLOCKS), batches)


@pytest.mark.soak
def test_ranks_agree_with_transformers(tmp_path: Path, soak: bool) -> None:
    for name in MODELS if soak else EVERY_DAY:
        # Every day the others, with four, are those in bfloat16 and with whole experts.
        check_logits(name, tmp_path / name, (2, 4) if soak else (2,))


def check_logits(name: str, tmp_path: Path, sizes: Sequence[int]) -> None:
    batches = make_batches(6)
    wanted = logits_of_transformers(name, torch.float32, batches)
    save(name, tmp_path)
    for size in sizes:
        logits = run_ranks(config_of(tmp_path, size), size, batches)
        assert difference(logits, wanted) < TOLERANCE


@pytest.mark.soak
def test_bfloat16_on_ranks_is_as_precise_as_on_one(tmp_path: Path, soak: bool) -> None:
    """Partial products are rounded to bfloat16, as the product of one rank is."""
    for name in MODELS if soak else EVERY_DAY[:2]:
        sizes = (1, 2, 4) if soak else (1, 4)
        check_precision(name, tmp_path / name, sizes)


def check_precision(name: str, tmp_path: Path, sizes: Sequence[int]) -> None:
    batches = make_batches(6)
    exact = logits_of_transformers(name, torch.float32, batches)
    usual = difference(logits_of_transformers(name, torch.bfloat16, batches), exact)
    save(name, tmp_path)
    # With experts the difference is mostly by tokens that get other ones.
    most = 2 if name in WITH_EXPERTS else 1.4
    for size in sizes:
        config = config_of(tmp_path, size, dtype="bfloat16", invariant=size == 1)
        assert difference(run_ranks(config, size, batches), exact) < most * usual


@pytest.mark.parametrize(
    "name",
    [name if name == "qwen2_moe" else in_soak(name) for name in WITH_EXPERTS],
)
@pytest.mark.soak
def test_ranks_with_whole_experts_agree_with_transformers(
    name: str, tmp_path: Path, soak: bool
) -> None:
    batches = make_batches(6)
    wanted = logits_of_transformers(name, torch.float32, batches)
    save(name, tmp_path)
    for size in (2, 4) if soak else (4,):
        config = config_of(tmp_path, size, expert_parallel=size)
        assert difference(run_ranks(config, size, batches), wanted) < TOLERANCE
