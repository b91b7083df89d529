"""The promises of every linear layer's method, as tests that each implementation inherits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nano_inference.stages.executor.runner.adapters.layers import AdapterStep, Layer, Layout
from nano_inference.stages.executor.runner.kernels.cpu import Linear, LinearKind
from nano_inference.stages.executor.runner.linear.choose import method_of
from nano_inference.stages.executor.runner.linear.method import LinearMethod, LoraPair

from ...refusals import needs_kernels

INPUTS, OUTPUTS, RANK = 32, 24, 3
TOLERANCES = {torch.bfloat16: 0.05, torch.float32: 1e-4}

T = TypeVar("T")

Work = Callable[[LinearMethod, int], T]
"""Done with a rank's method and its number."""


class LinearContract(ABC):
    """Tests of a method, on all ranks that share the layer.

    Attributes:
        dtype: Dtype of the weights.
        inputs: Input features of the whole layer.
        outputs: Output features of the whole layer.
    """

    dtype = torch.float32
    inputs, outputs = INPUTS, OUTPUTS

    @abstractmethod
    def on_each(self, work: Work[T]) -> list[T]:
        """Return the results of work with each rank's method, whose weights are not set."""

    def own_rows(self, rank: int, x: Tensor) -> Tensor:
        """The features of rows that a rank's layer takes."""
        return x

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The rows of the whole layer, of those that the ranks return."""
        for each in outputs[1:]:
            assert torch.equal(each, outputs[0])
        return outputs[0]

    def plain(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The rows of the module without adapters, in float32."""
        return F.linear(x.float(), weights["weight"].float(), weights["bias"].float())

    def product(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The rows of the method, likewise."""
        return self.plain(x, weights)

    # --- tools --------------------------------------------------------------------------------

    def shape_of(self, name: str) -> tuple[int, ...]:
        return (self.outputs, self.inputs) if name == "weight" else (self.outputs,)

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: self.shape_of(name) for name in ("weight", "bias")}
        return {
            name: (torch.randn(shape, generator=generator) / 4).to(self.dtype)
            for name, shape in shapes.items()
        }

    def rows(self, count: int = 5) -> Tensor:
        generator = torch.Generator().manual_seed(9)
        return torch.randn(count, self.inputs, generator=generator).to(self.dtype)

    def write(self, method: LinearMethod, weights: dict[str, Tensor]) -> None:
        """Write weights like a checkpoint or an update."""
        for name, tensor in weights.items():
            for box in method.boxes(name):
                box.write(tensor[box.place])

    def check(self, outputs: list[Tensor], wanted: Tensor) -> None:
        found = self.joined(outputs)
        assert found.dtype == self.dtype
        assert found.shape == wanted.shape
        assert (found.float() - wanted).abs().max() <= TOLERANCES[self.dtype]

    # --- promises -----------------------------------------------------------------------------

    @torch.no_grad()
    def test_the_product_is_that_of_the_whole_layer(self) -> None:
        weights, x = self.weights(), self.rows()

        def work(method: LinearMethod, rank: int) -> Tensor:
            self.write(method, weights)
            rows = self.own_rows(rank, x)
            assert rows.shape[-1] == method.inputs
            output = method.multiply(rows)
            assert output.shape[-1] == method.outputs
            return output

        self.check(self.on_each(work), self.product(x, weights))

    @torch.no_grad()
    def test_new_weights_by_name_are_in_the_next_product(self) -> None:
        before, after, x = self.weights(), self.weights(1), self.rows()

        def work(method: LinearMethod, rank: int) -> tuple[Tensor, Tensor]:
            self.write(method, before)
            rows = self.own_rows(rank, x)
            first = method.multiply(rows)
            self.write(method, {"weight": after["weight"]})
            return first, method.multiply(rows)

        found = self.on_each(work)
        self.check([first for first, _ in found], self.product(x, before))
        changed = {**before, "weight": after["weight"]}
        self.check([second for _, second in found], self.product(x, changed))

    @torch.no_grad()
    def test_every_number_has_a_place_on_one_rank(self) -> None:
        """Each number of the weight has one; each rank that adds the bias has it."""
        places = self.on_each(
            lambda method, _: {
                name: [box.place for box in method.boxes(name)] for name in ("weight", "bias")
            }
        )
        for name in ("weight", "bias"):
            counted = torch.zeros(self.shape_of(name))
            for rank in places:
                for place in rank[name]:
                    counted[place] += 1
            assert counted.min() >= 1
            assert name == "bias" or counted.max() == 1

    def test_bytes_are_those_of_the_weights(self) -> None:
        def work(method: LinearMethod, _: int) -> tuple[int, int]:
            boxes = [box for name in ("weight", "bias") for box in method.boxes(name)]
            return method.num_bytes, sum(box.target.nbytes for box in boxes)

        for held, placed in self.on_each(work):
            assert held == placed

    @torch.no_grad()
    def test_packed_weights_have_the_same_product_after_an_update(self) -> None:
        """The kernels' form of the layer is updated in place."""
        needs_kernels(self.dtype)
        after, x = self.weights(1), self.rows()

        def work(method: LinearMethod, rank: int) -> Tensor | None:
            packed = method.pack()
            if packed is None:
                return None
            fast = Linear([packed], LinearKind.PLAIN)
            self.write(method, self.weights())
            rows = self.own_rows(rank, x)
            fast(rows)
            self.write(method, after)
            return fast(rows)

        found = [each for each in self.on_each(work) if each is not None]
        if found:
            self.check(found, self.product(x, after))

    @torch.no_grad()
    def test_an_adapter_is_added_by_the_parts_of_each_rank(self) -> None:
        """Each part of `split_pair` adds its share, at the module that it names."""
        weights, x = self.weights(), self.rows()
        generator = torch.Generator().manual_seed(5)
        pair = LoraPair(
            torch.randn(RANK, self.inputs, generator=generator).to(self.dtype) / 4,
            torch.randn(1, RANK, self.outputs, generator=generator).to(self.dtype) / 4,
        )
        step = AdapterStep(np.zeros(len(x), np.int64), [RANK], torch.device("cpu"), True)

        def work(method: LinearMethod, rank: int) -> Tensor:
            self.write(method, weights)
            places = [box.place for box in method.boxes("weight")]
            for name, part in method.split_pair(pair, places).items():
                added = Layer(Layout.of([(0, RANK)], torch.device("cpu")), {0: part})
                inner = method_of(method.layer.get_submodule(name))
                assert inner is not None
                inner.layer.forward = _with(step, added, inner.layer.forward)  # type: ignore[method-assign]
            return method.layer(self.own_rows(rank, x))

        low = F.linear(F.linear(x.float(), pair.a.float()), pair.b[0].t().float())
        self.check(self.on_each(work), self.plain(x, weights) + low)


def _with(
    step: AdapterStep, added: Layer, plain: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda x: step.add(added, x, plain(x))


def module_of(dtype: torch.dtype) -> nn.Linear:
    """A layer without numbers."""
    return nn.Linear(INPUTS, OUTPUTS, dtype=dtype).requires_grad_(False)
