"""Each method of a linear layer keeps the contract."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import nano_inference
from nano_inference.stages.executor.runner.adapters.layers import (
    AdaptedLinear,
    AdapterStep,
    Layer,
)
from nano_inference.stages.executor.runner.adapters.layers import (
    Layout as AdapterLayout,
)
from nano_inference.stages.executor.runner.linear.choose import method_of
from nano_inference.stages.executor.runner.linear.method import LinearMethod, LoraPair
from nano_inference.stages.executor.runner.ranks.group import Layout, OneRank, RankGroup
from nano_inference.stages.executor.runner.ranks.layers import shard_module
from nano_inference.stages.executor.runner.ranks.plan import Style

from ..ranks.group import on_ranks
from .contract import INPUTS, OUTPUTS, RANK, LinearContract, Work, module_of

T = TypeVar("T")

LAYERS = ("Linear", "Conv1D", "RowParallelLinear", "ColumnParallelLinear", "GatheredLinear")


def known(module: object) -> LinearMethod:
    method = method_of(module)
    assert method is not None
    return method


class TestFloat32(LinearContract):
    def on_each(self, work: Work[T]) -> list[T]:
        return [work(known(module_of(self.dtype)), 0)]


class TestBfloat16(TestFloat32):
    dtype = torch.bfloat16


class TestTransposed(LinearContract):
    """GPT-2's layer, whose weight is `[in, out]`."""

    def on_each(self, work: Work[T]) -> list[T]:
        return [work(known(Conv1D(OUTPUTS, INPUTS).requires_grad_(False)), 0)]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return (INPUTS, OUTPUTS) if name == "weight" else (OUTPUTS,)

    def plain(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return x @ weights["weight"] + weights["bias"]


class TestRows(LinearContract):
    """Two ranks share the input features, and each has the sum."""

    style = Style.ROWS
    invariant = False

    def on_each(self, work: Work[T]) -> list[T]:
        def run(group: RankGroup) -> T:
            layout = Layout(group, self.invariant)
            module = shard_module(module_of(self.dtype), self.style, layout)
            return work(known(module.requires_grad_(False)), group.rank)

        return on_ranks(2, run)

    def own_rows(self, rank: int, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[rank]


class TestRowsInBfloat16(TestRows):
    dtype = torch.bfloat16


class TestInvariantRows(TestRows):
    invariant = True


class TestRowsOfWhole(TestInvariantRows):
    style = Style.ROWS_OF_WHOLE

    def own_rows(self, rank: int, x: Tensor) -> Tensor:
        return x


class TestInvariantRowsOfOneRank(TestInvariantRows):
    """The kernels sum the parts, too."""

    def on_each(self, work: Work[T]) -> list[T]:
        module = shard_module(module_of(self.dtype), self.style, Layout(OneRank(), True))
        return [work(known(module.requires_grad_(False)), 0)]

    def own_rows(self, rank: int, x: Tensor) -> Tensor:
        return x


class TestColumns(TestRows):
    style = Style.COLUMNS

    def own_rows(self, rank: int, x: Tensor) -> Tensor:
        return x

    def joined(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs, -1)


class TestInvariantColumns(TestColumns):
    invariant = True


class TestGatheredColumns(TestInvariantColumns):
    style = Style.COLUMNS_GATHERED

    def joined(self, outputs: list[Tensor]) -> Tensor:
        assert torch.equal(*outputs)
        return outputs[0]


class TestAdapted(TestFloat32):
    """A layer with an adapter, in a step in which each row has it."""

    def on_each(self, work: Work[T]) -> list[T]:
        method = known(module_of(self.dtype))
        step = AdapterStep(np.zeros(5, np.int64), [RANK], torch.device("cpu"), one_by_one=True)
        layout = AdapterLayout.of([(0, RANK)], torch.device("cpu"))
        table: Any = SimpleNamespace(current=step)
        return [work(AdaptedLinear(method, Layer(layout, {0: self.pair()}), table), 0)]

    def pair(self) -> LoraPair:
        generator = torch.Generator().manual_seed(3)
        return LoraPair(
            torch.randn(RANK, INPUTS, generator=generator),
            torch.randn(1, RANK, OUTPUTS, generator=generator),
        )

    def product(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        a, b = self.pair()
        return super().product(x, weights) + x @ a.t() @ b[0]


@torch.no_grad()
def test_kernels_sum_the_parts_of_one_rank() -> None:
    """Several ranks have one part each, and exchange the sum."""
    alone = known(shard_module(module_of(torch.float32), Style.ROWS, Layout(OneRank(), True)))
    packed = alone.pack_sum()
    assert packed is not None
    assert len(packed.parts) == 4
    assert sum(part.inputs for part in packed.parts) == alone.inputs
    assert packed.bias is not None
    assert packed.bias["bias"] is not None

    def on_rank(group: RankGroup) -> object:
        layout = Layout(group, True)
        return known(shard_module(module_of(torch.float32), Style.ROWS, layout)).pack_sum()

    assert on_ranks(2, on_rank) == [None, None]


def test_weights_that_are_not_contiguous_are_not_packed() -> None:
    module = module_of(torch.float32)
    module.weight.data = torch.zeros(INPUTS, OUTPUTS).t()
    assert known(module).pack() is None


def test_other_modules_have_no_method() -> None:
    class Own(nn.Linear):
        pass

    for module in (nn.Embedding(2, 2), Own(2, 2), nn.Identity(), None):
        assert method_of(module) is None


def test_layers_are_named_by_methods_and_ranks_alone() -> None:
    """Elsewhere a layer is known by its method, so that another method needs no change there."""
    executor = Path(nano_inference.__path__[0]) / "stages" / "executor"
    named = set()
    for path in executor.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom) and "kernels" not in str(node.module):
                name = next((each.name for each in node.names if each.name in LAYERS), "")
            if name in LAYERS:
                named.add(str(path.relative_to(executor)))
    assert named == {
        "runner/linear/choose.py",
        "runner/linear/dense.py",
        "runner/ranks/linear.py",
        "runner/quantization/shards.py",  # codes of the layers that ranks share
        *("runner/heads/eagle3.py", "runner/heads/mtp.py"),  # which make modules of their own
    }
