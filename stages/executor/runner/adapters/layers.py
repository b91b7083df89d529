"""The arithmetic of adapters: their additions to the outputs of linear layers in a step.

The layout of a step's tokens is computed once per step, not per layer. A layer then runs in one of
two ways. One adapter after the other: each adapter's rows are multiplied with its two matrices. Or
all together: the matrices of all loaded adapters, side by side, act as one adapter of a large rank,
and each row keeps the ranks of its own adapter. That is two products for any number of adapters,
but larger ones, so it is used for small total ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .....config import AdapterError, ModelError
from ..batch import IntArray
from ..linear.choose import method_of
from ..linear.method import LinearMethod, LoraPair
from ..loaded_model import LoadedModel
from ..shards import Box
from .adapter import Adapter

MOST_TOGETHER = 512
"""The largest total rank for which all adapters are computed together."""

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The order of adapters' ranks, shared by layers with the same order.

    Attributes:
        places: (first, one past the last) rank by slot.
        owners: `[ranks]`, the slot of each rank.
    """

    places: Mapping[int, tuple[int, int]]
    owners: Tensor

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, int]], device: torch.device) -> Layout:
        """`ranks`: (slot, rank) of each adapter."""
        ends = np.cumsum([rank for _, rank in ranks]).tolist()
        places = {slot: (end - rank, end) for (slot, rank), end in zip(ranks, ends, strict=True)}
        owners = np.repeat([slot for slot, _ in ranks], [rank for _, rank in ranks])
        return cls(places, torch.from_numpy(owners).to(device))


class Layer:
    """The matrices of all adapters for one module: `a` `[ranks, in]`, `b`
    `[pieces, ranks, out / pieces]`.

    Attributes:
        pairs: By slot, each adapter's views of `a` and `b`.
    """

    __slots__ = ("a", "b", "layout", "pairs")

    def __init__(self, layout: Layout, pairs: Mapping[int, LoraPair]) -> None:
        """`pairs`: by slot, in the layout's order."""
        self.layout = layout
        self.a = torch.cat([pair.a for pair in pairs.values()])
        self.b = torch.cat([pair.b for pair in pairs.values()], dim=1)
        self.pairs = {
            slot: LoraPair(self.a[start:stop], self.b[:, start:stop])
            for slot, (start, stop) in layout.places.items()
        }


class HasStep(Protocol):
    """Holder of the adapters of the step that runs, if it has any: an AdapterTable."""

    @property
    def current(self) -> AdapterStep | None: ...


class AdaptedLinear(LinearMethod):
    """A linear layer whose output adapters are added to. Weights and updates are the layer's own.

    The kernels, which compute several layers in one product, don't have it.
    """

    def __init__(self, method: LinearMethod, added: Layer, adapters: HasStep) -> None:
        """Add the adapters' matrices for this layer, `added`, within `adapters.applied`."""
        self.inputs, self.outputs = method.inputs, method.outputs
        self._method, self._added, self._adapters = method, added, adapters
        # Not the layer as such, which may call this one as its forward pass.
        self._plain: Callable[[Tensor], Tensor] = method.layer.forward

    @property
    def layer(self) -> nn.Module:
        return self._method.layer

    def multiply(self, x: Tensor) -> Tensor:
        step = self._adapters.current
        assert step is not None
        return step.add(self._added, x, self._plain(x))

    def boxes(self, name: str) -> list[Box]:
        return self._method.boxes(name)

    def pairs(self) -> Iterator[tuple[Index, LoraPair]]:
        """Iterate over the step's adapters of this layer: their tokens, and their matrices."""
        step = self._adapters.current
        assert step is not None
        for slot, index in step.groups:
            if (pair := self._added.pairs.get(slot)) is not None:
                yield index, pair


class AdapterStep:
    """The adapters of one step's tokens.

    Attributes:
        slots: `[tokens]`, negative for none.
        together: Whether they are computed together.
    """

    def __init__(
        self, slots: IntArray, ranks: Sequence[int], device: torch.device, one_by_one: bool
    ) -> None:
        """Lay out a step with at least one adapter.

        Args:
            slots: As the attribute.
            ranks: By slot, of all loaded adapters.
            device: Device of the model.
            one_by_one: Never compute them together.
        """
        self._device, self.slots = device, slots
        self._used: list[int] = np.unique(slots[slots >= 0]).tolist()
        self.together = not one_by_one and len(self._used) > 1 and sum(ranks) <= MOST_TOGETHER
        self._masks: dict[int, Tensor] = {}
        if self.together:
            chosen = np.flatnonzero(slots >= 0)
            self._index = self._index_of(chosen)
            self._owners = torch.from_numpy(slots[chosen]).to(device)[:, None]

    @cached_property
    def groups(self) -> list[tuple[int, Index]]:
        """The adapters' slots, and the tokens of each."""
        return [(slot, self._index_of(np.flatnonzero(self.slots == slot))) for slot in self._used]

    def add(self, layer: Layer, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' outputs for `x` to `y`, in place: `[..., tokens, in]` to
        `[..., tokens, out]`."""
        rows, outputs = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if self.together:
            hidden = F.linear(rows[self._index], layer.a)
            hidden = hidden.masked_fill(self._others(layer.layout), 0)
            _add_products(outputs, self._index, hidden, layer.b)
        for slot, index in () if self.together else self.groups:
            pair = layer.pairs.get(slot)
            if pair is not None:
                hidden = F.linear(rows[index], pair.a)
                _add_products(outputs, index, hidden, pair.b)
        return outputs.view(y.shape)

    def _others(self, layout: Layout) -> Tensor:
        """Return `[tokens, ranks]`, true for ranks of other adapters than the token's."""
        mask = self._masks.get(id(layout))
        if mask is None:
            mask = self._masks[id(layout)] = self._owners != layout.owners
        return mask

    def _index_of(self, chosen: IntArray) -> Index:
        """Return a slice for consecutive tokens, which need no gather."""
        first, last = int(chosen[0]), int(chosen[-1])
        if last - first + 1 == len(chosen):
            return slice(first, last + 1)
        return torch.from_numpy(chosen).to(self._device)


def _add_products(outputs: Tensor, index: Index, hidden: Tensor, b: Tensor) -> None:
    width = b.shape[-1]
    for number, piece in enumerate(b):
        columns = outputs.narrow(1, number * width, width)
        _add_at(columns, index, F.linear(hidden, piece.t()))


def _add_at(outputs: Tensor, index: Index, added: Tensor) -> None:
    if isinstance(index, slice):
        outputs[index].add_(added)
    else:
        outputs.index_add_(0, index, added)


def own_pairs(pairs: Mapping[str, LoraPair], model: LoadedModel) -> Mapping[str, LoraPair]:
    """Return an adapter's pairs for this rank's modules.

    Args:
        pairs: By the names of the whole model's modules.
        model: The model, or this rank's shard.
    """
    if model.shards is None:
        return pairs
    own: dict[str, LoraPair] = {}
    for name, pair in pairs.items():
        places = [box.place for box in model.shards.shards[f"{name}.weight"].boxes()]
        if not places:
            continue  # a layer of another stage
        method = method_of(model.module.get_submodule(name))
        assert method is not None
        for part, own_pair in method.split_pair(pair, places).items():
            own[f"{name}.{part}".removesuffix(".")] = own_pair
    return own


def check_products(adapter: Adapter, check: Callable[[], AbstractContextManager[object]]) -> None:
    """Try products with an adapter's tensors within `check`.

    Raises:
        AdapterError: Deterministic mode can't multiply with them.
    """
    seen = set()
    try:
        with check(), torch.inference_mode():
            for pair in adapter.pairs.values():
                if (shapes := (pair.a.shape, pair.b.shape)) not in seen:
                    seen.add(shapes)
                    hidden = F.linear(pair.a.new_ones(1, pair.a.shape[1]), pair.a)
                    for piece in pair.b:
                        F.linear(hidden, piece.t())
    except ModelError as error:
        raise AdapterError(error.message, code="adapter_unsupported") from None


def lay_out(
    slots: Sequence[Adapter | None], model: LoadedModel
) -> tuple[list[Adapter | None], list[tuple[LinearMethod, Layer]]]:
    """Lay the tensors of these adapters side by side, module by module.

    Returns:
        The adapters, whose tensors are views of the layers, so that each exists once; and each
        module's layer.
    """
    names = dict.fromkeys(name for adapter in slots if adapter for name in adapter.pairs)
    layouts: dict[tuple[tuple[int, int], ...], Layout] = {}
    layers: dict[str, Layer] = {}
    for name in names:
        pairs = {
            slot: adapter.pairs[name]
            for slot, adapter in enumerate(slots)
            if adapter is not None and name in adapter.pairs
        }
        ranks = tuple((slot, pair.a.shape[0]) for slot, pair in pairs.items())
        if ranks not in layouts:
            layouts[ranks] = Layout.of(ranks, model.device)
        layers[name] = Layer(layouts[ranks], pairs)
    laid = [
        adapter and replace(adapter, pairs={n: layers[n].pairs[slot] for n in adapter.pairs})
        for slot, adapter in enumerate(slots)
    ]
    added = []
    for name, layer in layers.items():
        method = method_of(model.module.get_submodule(name))
        assert method is not None
        added.append((method, layer))
    return laid, added
