"""Weight updates of several ranks: whole tensors from rank 0, of which each keeps its part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nano_inference.config import WeightsError
from nano_inference.stages.executor import LoadedModel
from nano_inference.stages.executor.runner import rank_weights
from nano_inference.stages.executor.runner.rank_weights import write_everywhere
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup
from nano_inference.stages.executor.runner.sharded_model import load_sharded
from nano_inference.stages.executor.runner.shards import NewShard, NewWeight, Receipt
from nano_inference.stages.executor.runner.weights.parts import PartsTaker
from nano_inference.stages.executor.runner.weights.sync_manager import WeightSyncManager

from .....soaking import in_soak
from .group import on_ranks
from .models import (
    WITH_EXPERTS,
    WITH_WIDE_TENSORS,
    config_of,
    hash_of,
    make_batches,
    make_whole_model,
    run_ranks,
    save,
)

NAMES = ("qwen2", "qwen3", "gemma3", "phi3", "qwen2_moe", "mixtral")
"""Biases, tied, scaled and fused layers, experts."""


def update(tensors: Mapping[str, Tensor], model: LoadedModel, group: RankGroup) -> None:
    """Replace all weights, through the manager on rank 0."""
    shards = model.shards
    assert shards is not None
    if group.rank:
        write_everywhere(shards, group.broadcast, None)
        return
    write = partial(write_everywhere, shards, group.broadcast)
    manager = WeightSyncManager(model.module, shards=shards, write=write)
    assert manager.sync_blocking(tensors) == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name if name in ("phi3", "mixtral") else in_soak(name) for name in NAMES]
)
def test_updated_ranks_have_the_bits_of_loaded_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    # Small enough for several pieces of most tensors.
    monkeypatch.setattr(rank_weights, "_PIECE_BYTES", 1000)
    batches = make_batches(4)
    other = make_whole_model(name, seed=1)
    wanted_in = save(name, tmp_path / "wanted", seed=1)
    before_in = save(name, tmp_path / "before", seed=0)
    change = partial(update, dict(other.state_dict()))
    # Every day experts are whole, and the other model has none.
    each = (1, 2) if soak else (2,)
    for experts in each if name in WITH_EXPERTS else (1,):
        wanted, before = (
            config_of(folder, 2, expert_parallel=experts) for folder in (wanted_in, before_in)
        )
        logits = run_ranks(before, 2, batches, change)
        assert hash_of(logits) == hash_of(run_ranks(wanted, 2, batches))
        assert hash_of(logits) != hash_of(run_ranks(before, 2, batches))


def take_parts(tensors: Mapping[str, Tensor], model: LoadedModel, group: RankGroup) -> None:
    """Replace all weights by the parts that each rank takes of whole tensors."""
    shards = model.shards
    assert shards is not None
    taker = PartsTaker(shards, [*tensors], Receipt(1, shards.layout), checks=not group.rank)
    for name, tensor in tensors.items():
        taker.take(name, tensor)
    found = taker.parts()
    parts = {name: each.parts for name, each in found.items() if isinstance(each, NewShard)}
    assert len(found) == len(parts)

    def write(new: Mapping[str, NewWeight]) -> None:
        assert {name for name, each in new.items() if isinstance(each, NewShard)} == {*parts}
        shards.write_parts(parts)

    checksums = group.all_gather(torch.tensor(taker.checksum >> 1))
    assert len({*checksums.tolist()}) == 1
    if group.rank:
        shards.write_parts(parts)
        return
    manager = WeightSyncManager(model.module, shards=shards, write=write)
    shards.layout += 1
    with pytest.raises(WeightsError, match="experts have changed their owners"):
        manager.start_sync(found)
    shards.layout -= 1
    assert manager.sync_blocking(manager.prepare(found)) == 1


@pytest.mark.parametrize("name", ["qwen3_moe", *map(in_soak, ("phi3", "gemma3", "mixtral"))])
def test_each_rank_keeps_its_parts_of_tensors_that_pass(name: str, tmp_path: Path) -> None:
    """By the names of a model and of a checkpoint, the latter in any order."""
    from safetensors.torch import load_file

    batches = make_batches(1)
    wanted_in = save(name, tmp_path / "wanted", seed=1)
    of_model = dict(make_whole_model(name, seed=1).state_dict())
    of_checkpoint = dict(reversed(load_file(wanted_in / "model.safetensors").items()))
    before = config_of(save(name, tmp_path / "before"), 2)
    wanted = hash_of(run_ranks(config_of(wanted_in, 2), 2, batches))
    for tensors in (of_model, of_checkpoint):
        assert hash_of(run_ranks(before, 2, batches, partial(take_parts, tensors))) == wanted


def test_checkpoint_names_are_converted_for_ranks(tmp_path: Path) -> None:
    """A trainer may send experts one by one, as checkpoints have them."""
    from safetensors.torch import load_file

    batches = make_batches(3)
    folder = save("qwen3_moe", tmp_path / "wanted", seed=1)
    tensors = load_file(folder / "model.safetensors")
    assert any(".experts.0." in name for name in tensors)
    before = config_of(save("qwen3_moe", tmp_path / "before"), 2)
    logits = run_ranks(before, 2, batches, partial(update, tensors))
    assert hash_of(logits) == hash_of(run_ranks(config_of(folder, 2), 2, batches))


@pytest.mark.parametrize(
    "name", [name if name == "glm4_moe" else in_soak(name) for name in WITH_WIDE_TENSORS]
)
def test_float32_tensors_of_a_bfloat16_model_are_updated_exactly(name: str, tmp_path: Path) -> None:
    """By the names of a model and of a checkpoint, on rank 0 and on each rank."""
    from safetensors.torch import load_file

    batches = make_batches(1)
    folder = save(name, tmp_path / "wanted", seed=1)
    before, wanted = (
        config_of(each, 2, dtype="bfloat16") for each in (save(name, tmp_path / "before"), folder)
    )
    whole = make_whole_model(name, seed=1).to(torch.bfloat16).state_dict()
    wide = make_whole_model(name, seed=1).state_dict()
    # As a trainer in bfloat16 has them, and all in float32.
    of_model = {key: wide[key] if _is_wide(key) else tensor for key, tensor in whole.items()}
    of_checkpoint = load_file(folder / "model.safetensors")
    expected = hash_of(run_ranks(wanted, 2, batches))
    for change in (partial(update, of_model), partial(take_parts, of_checkpoint)):
        assert hash_of(run_ranks(before, 2, batches, change)) == expected


def _is_wide(name: str) -> bool:
    return name.endswith(("e_score_correction_bias", "gate.weight"))


def test_shapes_of_whole_tensors_are_checked(tmp_path: Path) -> None:
    config = config_of(save("qwen3", tmp_path), 2)

    def check(group: RankGroup) -> str:
        model = load_sharded(config, group)
        manager = WeightSyncManager(model.module, shards=model.shards)
        local = {f"{name}.weight": part.data for name, part in _parts_of(model, "q_proj")}
        with pytest.raises(WeightsError, match="the model's is \\(64, 48\\)") as refused:
            manager.start_sync(local, partial=True)
        with pytest.raises(WeightsError, match="are one tensor"):
            whole = dict(make_whole_model("qwen3").state_dict())
            manager.start_sync({**whole, "lm_head.weight": whole["lm_head.weight"] + 1})
        return refused.value.code

    assert on_ranks(2, check) == ["weights_refused"] * 2


def _parts_of(model: LoadedModel, ending: str) -> list[tuple[str, Any]]:
    return [
        (name, module.weight)
        for name, module in model.module.named_modules()
        if name.endswith(ending)
    ]


def test_the_whole_model_is_counted(tmp_path: Path) -> None:
    whole = make_whole_model("qwen3_moe")
    config = config_of(save("qwen3_moe", tmp_path), 4)
    counts = on_ranks(4, lambda group: _counts(load_sharded(config, group)))
    number = sum(parameter.numel() for parameter in whole.parameters())
    assert [count[:2] for count in counts] == [(number, 4 * number)] * 4
    assert max(count[2] for count in counts) < 0.4 * number


def _counts(model: LoadedModel) -> tuple[int, int, int]:
    own = sum(parameter.numel() for parameter in model.module.parameters())
    return model.num_parameters, model.weight_bytes, own


def test_one_rank_writes_its_weights_itself(tmp_path: Path) -> None:
    config = replace(config_of(save("llama", tmp_path)), rank_invariant=True, deterministic=True)
    model = load_sharded(config, OneRank())
    new = dict(make_whole_model("llama", seed=1).state_dict())
    update(new, model, OneRank())
    assert model.shards is not None
    for name, tensor in new.items():
        whole = torch.zeros_like(tensor)
        for box in model.shards.shards[name].boxes():
            whole[box.place] = box.read()
        assert torch.equal(whole, tensor), name
