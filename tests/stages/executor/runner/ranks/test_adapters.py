"""Adapters of a model over ranks, as threads: the bits and the logits of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from torch import Tensor

from nano_inference.config import AdapterError, EngineConfig
from nano_inference.stages.executor import wrap_model
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter
from nano_inference.stages.executor.runner.interface import ModelRunner, make_runner
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from ..adapters.making import ALL, ATTENTION, make_adapter
from .group import on_ranks
from .models import (
    NUM_BLOCKS,
    WITH_EXPERTS,
    Batch,
    config_of,
    difference,
    hash_of,
    logits_of,
    make_batches,
    make_whole_model,
    save,
)
from .test_pipelining import run_stages, settings

PACKED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
TARGETS = {"llama with biases": ALL, "phi3": PACKED, "qwen2_moe": ATTENTION}
"""Layers by model: sharded by outputs and by inputs, gathered, two in one, beside experts."""
EVERY_DAY = ("llama with biases",)
LIMITS = AdapterLimits()


def save_adapters(name: str, folder: Path) -> list[Path]:
    """Two adapters of different ranks, the second for some layers only."""
    model = make_whole_model(name)
    targets = TARGETS[name]
    for index, chosen in enumerate((targets, targets[-2:])):
        make_adapter(model, index, folder / f"a{index}", r=3 + index, target_modules=chosen)
    return [folder / "a0", folder / "a1"]


def logits_with(folders: list[Path], runner: ModelRunner, batches: list[Batch]) -> list[Tensor]:
    """Logits of the last token of each row; each token has one of the adapters, or none."""
    random = np.random.default_rng(0)
    for index, folder in enumerate(folders):
        runner.adapters.put(read_adapter(f"a{index}", 1, str(folder), runner.model, LIMITS))
    found = []
    for batch in batches:
        slots = random.integers(-1, len(folders), len(batch[1]))
        inputs = replace(runner.builder.build(*batch), adapters=runner.adapters.step(slots))
        with runner.active():
            found.append(runner.forward(inputs))
    return found


def run(config: EngineConfig, size: int, folders: list[Path], batches: list[Batch]) -> list[Tensor]:
    """Logits on rank 0, with adapters."""

    def work(group: RankGroup) -> list[Tensor]:
        runner = make_runner(config, load_sharded(config, group), NUM_BLOCKS)
        return logits_with(folders, runner, batches)

    return work(OneRank()) if size == 1 else on_ranks(size, work)[0]


@pytest.mark.soak
def test_one_two_and_four_ranks_give_the_same_bits(tmp_path: Path, soak: bool) -> None:
    for name in TARGETS if soak else EVERY_DAY:
        for dtype in ("float32", "bfloat16") if soak else ("bfloat16",):
            check_bits(name, dtype, tmp_path / f"{name} {dtype}", soak=soak)


def check_bits(name: str, dtype: str, folder: Path, *, soak: bool) -> None:
    model, folders, batches = save(name, folder), save_adapters(name, folder), make_batches(2)
    configs = [config_of(model, size, invariant=True, dtype=dtype) for size in (1, 2, 4)]
    if name in WITH_EXPERTS:
        configs.append(replace(configs[1], expert_parallel=2))
    hashes = [hash_of(run(each, each.tensor_parallel, folders, batches)) for each in configs]
    if soak:
        config = settings(model, 2, 2, invariant=True, dtype=dtype)
        logits = partial(logits_with, folders)
        hashes.append(hash_of(run_stages(config, 2, 2, len(batches), logits)))
    assert len({*hashes}) == 1, hashes


@pytest.mark.soak
def test_ranks_agree_with_one_process(tmp_path: Path, soak: bool) -> None:
    for name in TARGETS if soak else EVERY_DAY:
        check_logits(name, tmp_path / name)


def check_logits(name: str, folder: Path) -> None:
    model, folders, batches = save(name, folder), save_adapters(name, folder), make_batches(2)
    whole = wrap_model(make_whole_model(name), 64)
    alone = make_runner(config_of(Path(), kernels="off"), whole, NUM_BLOCKS)
    without = logits_of(alone, batches)
    wanted = logits_with(folders, alone, batches)
    assert difference(without, wanted) > 0.1
    for size in (2, 4):
        assert difference(run(config_of(model, size), size, folders, batches), wanted) < 1e-5


def test_an_adapter_that_one_process_refuses_is_refused(tmp_path: Path) -> None:
    model = load_sharded(config_of(save("qwen2_moe", tmp_path), invariant=True), OneRank())
    folder = save_adapters("qwen2_moe", tmp_path)[0]
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"self_attn.q_proj", b"self_attn.x_proj"))
    with pytest.raises(AdapterError, match="x_proj"):
        read_adapter("a", 1, str(folder), model, LIMITS)
