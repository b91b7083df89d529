"""Experts that belong to ranks: their owners change no bit, and may change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import LoadedModel
from nano_inference.stages.executor.runner.interface import make_runner
from nano_inference.stages.executor.runner.ranks.group import RankGroup
from nano_inference.stages.executor.runner.sharded_model import experts_in, load_sharded

from .....soaking import in_soak
from .group import on_ranks
from .models import (
    NUM_BLOCKS,
    WITH_EXPERTS,
    Batch,
    config_of,
    hash_of,
    logits_of,
    make_batches,
    make_whole_model,
    run_ranks,
    save,
)
from .test_weights import update

OWNERS = {
    2: [(0, 1, 0, 1, 0, 1, 0, 1), (1, 1, 1, 1, 0, 0, 0, 0), (1, 0, 0, 1, 1, 0, 1, 0)],
    4: [(0, 1, 2, 3, 0, 1, 2, 3), (3, 3, 2, 2, 1, 1, 0, 0), (1, 1, 0, 2, 3, 0, 3, 2)],
}
"""Ranks of eight experts, after each other."""


@pytest.mark.parametrize(
    "name",
    # tests/pipeline/test_ranks.py has qwen2_moe.
    [name if name == "mixtral" else in_soak(name) for name in WITH_EXPERTS],
)
@pytest.mark.soak
def test_owners_change_between_steps_without_a_bit(name: str, tmp_path: Path, soak: bool) -> None:
    batches = make_batches(12)
    folder = save(name, tmp_path)
    for size in OWNERS if soak else (4,):
        config = config_of(folder, size, expert_parallel=size)
        hashes = on_ranks(size, partial(_run_with_changes, config, batches))
        assert {*hashes} == {hash_of(run_ranks(config, size, batches))}


def _run_with_changes(config: EngineConfig, batches: list[Batch], group: RankGroup) -> str:
    model = load_sharded(config, group)
    runner = make_runner(config, model, NUM_BLOCKS)
    logits = logits_of(runner, batches[:3])
    for index, owners in enumerate(OWNERS[group.size], 1):
        for experts in experts_in(model.module):
            experts.set_owners(owners)
            assert sorted(experts.own) == [e for e in range(8) if owners[e] == group.rank]
        logits += logits_of(runner, batches[3 * index : 3 * index + 3])
    return hash_of(logits)


def test_weights_find_experts_that_have_moved(tmp_path: Path) -> None:
    batches = make_batches(3)
    folder = save("mixtral", tmp_path / "wanted", seed=1)
    before = config_of(save("mixtral", tmp_path / "before"), 2, expert_parallel=2)
    tensors = dict(make_whole_model("mixtral", seed=1).state_dict())

    def change(model: LoadedModel, group: RankGroup) -> None:
        for experts in experts_in(model.module):
            experts.set_owners(OWNERS[2][2])
        update(tensors, model, group)

    wanted = config_of(folder, 2, expert_parallel=2)
    assert hash_of(run_ranks(before, 2, batches, change)) == hash_of(run_ranks(wanted, 2, batches))


def test_owners_must_be_equally_many(tmp_path: Path) -> None:
    config = config_of(save("mixtral", tmp_path), 2, expert_parallel=2)

    def run(group: RankGroup) -> None:
        experts = experts_in(load_sharded(config, group).module)[0]
        for owners in ((0,) * 8, (0, 1), (0, 0, 0, 0, 2, 2, 2, 2)):
            with pytest.raises(ValueError, match="equally many"):
                experts.set_owners(owners)

    on_ranks(2, run)


def test_a_rank_without_tokens_takes_part(tmp_path: Path) -> None:
    """One token has two experts, and four ranks have two experts each."""
    batches = make_batches(40)
    single = [batch for batch in batches if len(batch[1]) == 1][:3]
    assert single
    folder = save("mixtral", tmp_path)
    config = config_of(folder, 4, expert_parallel=4)
    assert all(logits.isfinite().all() for logits in run_ranks(config, 4, single))


def test_tokens_of_each_expert_are_counted(tmp_path: Path) -> None:
    batches = make_batches(5)
    tokens = sum(len(ids) for _, ids, _ in batches)
    folder = save("olmoe", tmp_path)
    for expert_parallel in (1, 2):
        config = config_of(folder, 2, expert_parallel=expert_parallel)
        counts, chosen = on_ranks(2, partial(_count, config, batches))[0]
        assert counts == chosen
        assert sum(counts[0]) == 2 * tokens


def _count(
    config: EngineConfig, batches: list[Batch], group: RankGroup
) -> tuple[list[list[int]], list[list[int]]]:
    """The counts of each layer, and those of a hook."""
    model = load_sharded(config, group)
    runner = make_runner(config, model, NUM_BLOCKS)
    layers = experts_in(model.module)
    chosen = [torch.zeros(8, dtype=torch.int64) for _ in layers]

    def hook(numbers: Tensor, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        numbers += torch.bincount(args[1].flatten(), minlength=8)

    for experts, numbers in zip(layers, chosen, strict=True):
        experts.read_counts(reset=True)
        experts.register_forward_pre_hook(partial(hook, numbers))
    logits_of(runner, batches)
    read = [experts.read_counts(reset=True) for experts in layers]
    assert all(sum(experts.read_counts()) == 0 for experts in layers)
    return read, [numbers.tolist() for numbers in chosen]


def test_ranks_out_of_step_fail() -> None:
    """So that the tests above would see a collective that one rank skips."""

    def skip(group: RankGroup) -> None:
        if group.rank:
            group.all_gather(torch.zeros(2))
        else:
            group.all_gather(torch.zeros(3))

    with pytest.raises(AssertionError, match="out of step"):
        on_ranks(2, skip)
