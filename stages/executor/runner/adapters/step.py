"""What adapters add to the outputs of linear layers, for a batch whose rows have different ones.

What follows from the rows is worked out once a step and not for each layer. A layer then takes one
of two ways. One adapter after the other: the rows of each are multiplied with its two matrices. Or
all together: the matrices of all adapters that are loaded lie side by side and are taken for one of
a large rank, of whose numbers each row keeps those that are its own adapter's. That is two products
for any number of adapters, each with more numbers, so it is taken for some adapters of small ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..batch import IntArray
from .peft import LoraPair

MOST_TOGETHER = 512
"""The largest rank of all adapters together that is taken for one."""

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """How the ranks of adapters lie side by side; shared by all layers where they do so alike.

    Attributes:
        places: (first, one past the last) by slot.
        owners: `[ranks]`, the slot that each belongs to.
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
    """The matrices of all adapters for one module: `a` `[ranks, in]`, `b` `[ranks, out]`.

    Attributes:
        pairs: By slot, those of each adapter: parts of `a` and `b`.
    """

    __slots__ = ("a", "b", "layout", "pairs")

    def __init__(self, layout: Layout, pairs: Mapping[int, LoraPair]) -> None:
        """`pairs`: by slot, in the layout's order."""
        self.layout = layout
        self.a = torch.cat([pair.a for pair in pairs.values()])
        self.b = torch.cat([pair.b for pair in pairs.values()])
        self.pairs = {
            slot: LoraPair(self.a[start:stop], self.b[start:stop])
            for slot, (start, stop) in layout.places.items()
        }


class AdapterStep:
    """Which tokens of one step have which adapter."""

    def __init__(
        self,
        slots: IntArray,
        ranks: Sequence[int],
        device: torch.device,
        *,
        one_by_one: bool = False,
    ) -> None:
        """For some token that has one.

        Args:
            slots: `[tokens]`, negative for none.
            ranks: By slot, of all that are loaded.
            device: Where the model is.
            one_by_one: Never take them together.
        """
        self._device = device
        used = np.unique(slots[slots >= 0]).tolist()
        self.together = not one_by_one and len(used) > 1 and sum(ranks) <= MOST_TOGETHER
        self._masks: dict[int, Tensor] = {}
        self._groups: list[tuple[int, Index]] = []
        if self.together:
            chosen = np.flatnonzero(slots >= 0)
            self._index = self._index_of(chosen)
            self._owners = torch.from_numpy(slots[chosen]).to(device)[:, None]
        else:
            self._groups = [(slot, self._index_of(np.flatnonzero(slots == slot))) for slot in used]

    def add(self, layer: Layer, x: Tensor, y: Tensor) -> Tensor:
        """`y` with what the adapters give for `x`: `[..., tokens, in]` to `[..., tokens, out]`.

        `y` is written to.
        """
        rows, outputs = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if self.together:
            hidden = F.linear(rows[self._index], layer.a)
            hidden = hidden.masked_fill(self._others(layer.layout), 0)
            _add_at(outputs, self._index, F.linear(hidden, layer.b.t()))
        for slot, index in self._groups:
            pair = layer.pairs.get(slot)
            if pair is not None:
                hidden = F.linear(rows[index], pair.a)
                _add_at(outputs, index, F.linear(hidden, pair.b.t()))
        return outputs.view(y.shape)

    def _others(self, layout: Layout) -> Tensor:
        """`[tokens, ranks]`, which numbers are not those of a token's own adapter."""
        mask = self._masks.get(id(layout))
        if mask is None:
            mask = self._masks[id(layout)] = self._owners != layout.owners
        return mask

    def _index_of(self, chosen: IntArray) -> Index:
        """Tokens that follow one another need not be gathered."""
        first, last = int(chosen[0]), int(chosen[-1])
        if last - first + 1 == len(chosen):
            return slice(first, last + 1)
        return torch.from_numpy(chosen).to(self._device)


def _add_at(outputs: Tensor, index: Index, added: Tensor) -> None:
    if isinstance(index, slice):
        outputs[index].add_(added)
    else:
        outputs.index_add_(0, index, added)
