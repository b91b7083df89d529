"""Layers of ranks that no listed model has, and the order of their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nano_inference.stages.executor.runner.ranks.group import (
    Layout,
    OneRank,
    RankGroup,
    sum_pairwise,
)
from nano_inference.stages.executor.runner.ranks.layers import shard_module
from nano_inference.stages.executor.runner.ranks.plan import Style
from nano_inference.stages.executor.runner.shards import boxes_in

from .group import on_ranks


def make_shard(whole: nn.Module, style: Style, layout: Layout) -> Any:
    """A rank's part of a module, with its numbers."""
    module = shard_module(whole, style, layout)
    for name, parameter in whole.named_parameters():
        for box in boxes_in(module, name):
            box.write(parameter.data[box.place])
    return module.requires_grad_(False)


@pytest.mark.parametrize("invariant", [False, True])
def test_packed_layers_are_cut_separately(invariant: bool) -> None:
    """Half of the outputs are gates; a rank has the gates and ups of the same features."""
    torch.manual_seed(0)
    whole = nn.Linear(6, 16).requires_grad_(False)
    x = torch.randn(3, 6)
    gates, ups = whole(x).chunk(2, -1)

    def run(group: RankGroup) -> Tensor:
        layout = Layout(group, invariant)
        output: Tensor = make_shard(whole, Style.COLUMNS_PACKED, layout)(x)
        return output

    for rank, output in enumerate(on_ranks(2, run)):
        own = slice(4 * rank, 4 * rank + 4)
        wanted = torch.cat((gates[:, own], ups[:, own]), -1)
        assert torch.allclose(output, wanted, atol=1e-6)


def test_partial_sums_are_added_in_float32() -> None:
    """A sum of bfloat16 parts would lose the small ones."""
    whole = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    whole.weight.copy_(torch.tensor([[256.0, 1.0, 1.0, 0.0]]))
    x = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    layout = Layout(OneRank(), invariant=True)
    assert make_shard(whole, Style.ROWS, layout)(x).item() == 258.0
    parts = [torch.tensor(each, dtype=torch.bfloat16) for each in (256.0, 1.0, 1.0, 0.0)]
    assert sum_pairwise(parts).item() != 258.0


def test_a_layer_exchanges_one_sum() -> None:
    """The same collectives on each rank, and no more than needed."""
    whole = nn.Linear(8, 4).requires_grad_(False)
    for invariant in (False, True):

        def run(group: RankGroup, invariant: bool = invariant) -> Any:
            layout = Layout(group, invariant)
            make_shard(whole, Style.ROWS, layout)(torch.ones(1, 3, 8 // group.size))
            return group.calls  # type: ignore[attr-defined]

        assert on_ranks(2, run) == [[("all_gather", (1, 3, 4))]] * 2
