"""The contract of a linear layer, and what kernels, ranks and adapters exchange with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from ..kernels.packed import Packed, PackedSum
from ..shards import Box

if TYPE_CHECKING:
    pass

Place = tuple[slice, ...]
"""The position of a part in a tensor, like `Box.place`."""


class LoraPair(NamedTuple):
    """An adapter of one linear layer: adds (x A^T) B.

    Attributes:
        a: `[rank, in]`.
        b: `[pieces, rank, out / pieces]`, transposed and scaled. Each piece of the outputs is a
            product of its own; there are several where bits must not depend on the number of ranks.
    """

    a: Tensor
    b: Tensor


class LinearMethod(ABC):
    """The storage of one linear layer's weights, and the multiplication by them.

    New weights are written through the boxes of a tensor's name, in the dtype and shape of the
    whole model; a method that holds another form converts them there.

    Attributes:
        inputs: Features of a row that it takes here.
        outputs: Features of a row that it returns here.
        can_shard: Whether ranks can share the layer.
        is_sum: Whether the output is a sum of products, possibly over ranks.
        exchanges: Whether other ranks have a part.
    """

    inputs: int
    outputs: int
    can_shard = False
    is_sum = False
    exchanges = False

    @property
    @abstractmethod
    def layer(self) -> nn.Module:
        """The module in the model's tree."""

    @property
    def local(self) -> nn.Module:
        """The module that computes this rank's output features."""
        return self.layer

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(each.nbytes for each in self.layer.parameters())

    def multiply(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        output: Tensor = self.layer(x)
        return output

    def pack(self) -> Packed | None:
        """Return the weights for the CPU kernels; None if these don't have this product."""
        return None

    def pack_sum(self) -> PackedSum | None:
        """Return the weights likewise, of a layer that may be a sum."""
        packed = self.pack()
        return None if packed is None else PackedSum([packed])

    @abstractmethod
    def boxes(self, name: str) -> list[Box]:
        """Return the parts of the whole layer's "weight" or "bias" on this rank."""

    def split_pair(self, pair: LoraPair, places: Sequence[Place]) -> Mapping[str, LoraPair]:
        """Return this rank's part of an adapter.

        An adapter needs no exchange of its own. Of a layer whose output features are sharded, a
        rank has the columns of B for its own. Of a layer whose inputs are sharded, it has the
        columns of A for each of its parts, and the whole B: each part adds its share to the
        layer's partial sum.

        Args:
            pair: Weight and bias of the whole layer.
            places: Positions of the weight's boxes.

        Returns:
            By the names of modules below `layer`, "" for itself.
        """
        return {"": pair}
