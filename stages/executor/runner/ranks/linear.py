"""Linear layers that several ranks compute together (tensor parallel).

Each sharded dimension is cut into parts, and a rank has a run of them (`Layout`). Of a bfloat16
model each part's product is rounded to bfloat16, since torch's products return the dtype of their
arguments; only the sum over parts is in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear.dense import pack_dense
from ..linear.method import LinearMethod, LoraPair, Packed, PackedSum, Place
from ..shards import Box, whole_box
from .group import Layout
from .plan import Style


class _OwnMethod(LinearMethod):
    """A module that is its own method."""

    @property
    def layer(self) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self


class RowParallelLinear(nn.Module, _OwnMethod):
    """A linear layer over this rank's input features, summed over ranks.

    Attributes:
        parts: A linear layer for each part.
        bias: Added to the sum; None for none.
    """

    is_sum = True

    def __init__(self, whole: nn.Linear, layout: Layout, *, splits_input: bool) -> None:
        """`splits_input`: the input has the features of all ranks."""
        super().__init__()
        self._width = whole.in_features // layout.parts
        self.inputs = whole.in_features if splits_input else self._width * len(layout.own)
        self.outputs = whole.out_features
        self.bias = whole.bias
        self.exchanges = layout.group.size > 1
        self._layout = layout
        self._splits_input = splits_input
        like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        self.parts = nn.ModuleList(
            nn.Linear(self._width, whole.out_features, bias=False, **like) for _ in layout.own
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in or local in]` to `[..., out]`."""
        own, width = self._layout.own, self._width
        if self._splits_input:
            x = x[..., own.start * width : own.stop * width]
        # Products of strided rows may be summed in another order.
        pieces = [piece.contiguous() for piece in torch.split(x, width, -1)]
        parts = [part(piece).float() for part, piece in zip(self.parts, pieces, strict=True)]
        total = self._layout.sum(parts)
        if self.bias is not None:
            total = total + self.bias.float()
        return total.to(x.dtype)

    def pack_sum(self) -> PackedSum | None:
        packed = [pack_dense(part) for part in self.parts]
        parts = [part for part in packed if part is not None]
        whole = len(parts) == len(packed) and not self.exchanges
        return PackedSum(parts, self._parameters) if whole else None

    def boxes(self, name: str) -> list[Box]:
        if name != "weight":
            return [whole_box(self, name)]
        rows, width = slice(0, self.outputs), self._width
        return [
            Box(layer.get_parameter("weight").data, (rows, slice(part * width, (part + 1) * width)))
            for part, layer in zip(self._layout.own, self.parts, strict=True)
        ]

    def split_pair(self, pair: LoraPair, places: Sequence[Place]) -> Mapping[str, LoraPair]:
        return {
            f"parts.{index}": LoraPair(pair.a[:, inputs].contiguous(), pair.b)
            for index, (_, inputs) in enumerate(places)
        }


class ColumnParallelLinear(nn.Linear, _OwnMethod):
    """A linear layer of this rank's output features."""

    def __init__(self, whole: nn.Linear, layout: Layout, *, fused: int = 1) -> None:
        """`fused`: Layers of one size, side by side in `whole`, each of which is cut."""
        size = whole.out_features // fused
        run = layout.run(size)
        like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        has_bias = whole.bias is not None
        super().__init__(whole.in_features, fused * (run.stop - run.start), has_bias, **like)
        self.inputs, self.outputs = self.in_features, self.out_features
        self.piece = -(-size // layout.parts)
        self._by_pieces = layout.invariant
        self._places = [
            slice(index * size + start, index * size + min(start + self.piece, run.stop))
            for index in range(fused)
            for start in range(run.start, run.stop, self.piece)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., local out]`; one product for each part if bits must not depend on
        the number of ranks."""
        if not self._by_pieces:
            return super().forward(x)
        weights = torch.split(self.weight, self.piece)
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, self.piece)
        pieces = [F.linear(x, *each) for each in zip(weights, biases, strict=True)]
        return torch.cat(pieces, dim=-1)

    def pack(self) -> Packed | None:
        # Products of the kernels don't depend on the number of columns.
        return pack_dense(self)

    def boxes(self, name: str) -> list[Box]:
        tensor = getattr(self, name).data
        others = tuple(slice(0, width) for width in tensor.shape[1:])
        targets = torch.split(tensor, [part.stop - part.start for part in self._places])
        return [
            Box(target, (part, *others)) for target, part in zip(targets, self._places, strict=True)
        ]

    def split_pair(self, pair: LoraPair, places: Sequence[Place]) -> Mapping[str, LoraPair]:
        (b,) = pair.b
        return {"": LoraPair(pair.a, torch.stack([b[:, rows] for rows, *_ in places]))}


class GatheredLinear(nn.Module, _OwnMethod):
    """A linear layer whose output features are computed by ranks, and gathered.

    Attributes:
        part: This rank's.
    """

    def __init__(self, whole: nn.Linear, layout: Layout) -> None:
        super().__init__()
        self.inputs, self.outputs = whole.in_features, whole.out_features
        self.exchanges = layout.group.size > 1
        self._group = layout.group
        self.part = ColumnParallelLinear(whole, layout)
        self._most = self.part.piece * len(layout.own)

    @property
    def local(self) -> nn.Module:
        return self.part

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.part.weight

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        output: Tensor = self.part(x)
        if not self.exchanges:
            return output
        if missing := self._most - output.shape[-1]:
            output = F.pad(output, (0, missing))
        ranks = self._group.all_gather(output.contiguous())
        return torch.cat([*ranks], dim=-1)[..., : self.outputs]

    def boxes(self, name: str) -> list[Box]:
        return self.part.boxes(name)

    def split_pair(self, pair: LoraPair, places: Sequence[Place]) -> Mapping[str, LoraPair]:
        return {"part": self.part.split_pair(pair, places)[""]}


def shard_linear(whole: nn.Linear, style: Style, layout: Layout) -> nn.Module:
    """Return this rank's part of a layer, with memory for its weights."""
    if style in (Style.ROWS, Style.ROWS_OF_WHOLE):
        return RowParallelLinear(whole, layout, splits_input=style is Style.ROWS_OF_WHOLE)
    if style is Style.COLUMNS_GATHERED:
        return GatheredLinear(whole, layout)
    return ColumnParallelLinear(whole, layout, fused=2 if style is Style.COLUMNS_PACKED else 1)
