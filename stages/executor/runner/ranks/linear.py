"""Linear layers that several ranks compute together (tensor parallel).

Each sharded dimension is cut into parts, and a rank has a run of them (`Layout`). Of a bfloat16
model each part's product is rounded to bfloat16, since torch's products return the dtype of their
arguments; only the sum over parts is in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.packed import Packed, PackedSum
from ..linear.choose import method_of
from ..linear.dense import pack_dense
from ..linear.method import LinearMethod, LoraPair, Place
from ..shards import Box, boxes_in, whole_box
from .group import Layout
from .plan import Style

if TYPE_CHECKING:
    from ..linear.quantized import QuantizedLinear

    MakeCodes = Callable[[int, int], QuantizedLinear]


class _OwnMethod(LinearMethod):
    """A module that is its own method."""

    @property
    def layer(self) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self


class RowParallelLinear(nn.Module, _OwnMethod):
    """A linear layer over this rank's input features, summed over ranks.

    Attributes:
        width: Input features of a part.
        parts: A linear layer for each part.
        bias: Added to the sum; None for none.
    """

    is_sum = True

    def __init__(self, whole: nn.Linear, layout: Layout, *, splits_input: bool) -> None:
        """`splits_input`: the input has the features of all ranks."""
        super().__init__()
        self.width = whole.in_features // layout.parts
        self.inputs = whole.in_features if splits_input else self.width * len(layout.own)
        self.outputs = whole.out_features
        self.bias = whole.bias
        self.exchanges = layout.group.size > 1
        self._layout = layout
        self._splits_input = splits_input
        like = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        self.parts = nn.ModuleList(
            nn.Linear(self.width, whole.out_features, bias=False, **like) for _ in layout.own
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in or local in]` to `[..., out]`."""
        own, width = self._layout.own, self.width
        if self._splits_input:
            x = x[..., own.start * width : own.stop * width]
        # Products of strided rows may be summed in another order.
        pieces = [piece.contiguous() for piece in torch.split(x, width, -1)]
        parts = [part(piece).float() for part, piece in zip(self.parts, pieces, strict=True)]
        total = self._layout.sum(parts)
        if self.bias is not None:
            total = total + self.bias.float()
        return total.to(x.dtype)

    def quantize(self, make: MakeCodes) -> None:
        """Replace the weights by codes: `make` returns a layer of so many outputs and inputs."""
        for index in range(len(self.parts)):
            self.parts[index] = make(self.outputs, self.width)

    def pack_sum(self) -> PackedSum | None:
        methods = [method_of(part) for part in self.parts]
        packed = [None if method is None else method.pack() for method in methods]
        parts = [part for part in packed if part is not None]
        whole = len(parts) == len(packed) and not self.exchanges
        return PackedSum(parts, self._parameters) if whole else None

    def boxes(self, name: str) -> list[Box]:
        if name != "weight":
            return [whole_box(self, name)]
        rows, width = slice(0, self.outputs), self.width
        return [
            msgspec.structs.replace(box, place=(rows, slice(part * width, (part + 1) * width)))
            for part, layer in zip(self._layout.own, self.parts, strict=True)
            for box in boxes_in(layer, name)
        ]

    def split_pair(self, pair: LoraPair, places: Sequence[Place]) -> Mapping[str, LoraPair]:
        return {
            f"parts.{index}": LoraPair(pair.a[:, inputs].contiguous(), pair.b)
            for index, (_, inputs) in enumerate(places)
        }


class ColumnParallelLinear(nn.Linear, _OwnMethod):
    """A linear layer of this rank's output features.

    Attributes:
        coded: The layer whose codes are in place of the weight; None for a plain one.
    """

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
        self.coded: QuantizedLinear | None = None
        self._places = [
            slice(index * size + start, index * size + min(start + self.piece, run.stop))
            for index in range(fused)
            for start in range(run.start, run.stop, self.piece)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., local out]`; one product for each part if bits must not depend on
        the number of ranks."""
        if not self._by_pieces:
            output: Tensor = super().forward(x) if self.coded is None else self.coded(x)
            return output
        weight = self.weight if self.coded is None else self.coded.unpacked()
        weights = torch.split(weight, self.piece)
        biases = [None] * len(weights) if self.bias is None else torch.split(self.bias, self.piece)
        pieces = [F.linear(x, *each) for each in zip(weights, biases, strict=True)]
        return torch.cat(pieces, dim=-1)

    def quantize(self, make: MakeCodes) -> None:
        """As of `RowParallelLinear`."""
        self.coded = make(self.outputs, self.inputs)
        self.register_parameter("weight", None)
        self.coded.bias = self.bias

    def pack(self) -> Packed | None:
        # Products of the kernels don't depend on the number of columns.
        return pack_dense(self) if self.coded is None else self.coded.pack()

    def boxes(self, name: str) -> list[Box]:
        if self.coded is not None and name == "weight":
            return self._boxes_of_codes(self.coded)
        tensor = getattr(self, name).data
        others = tuple(slice(0, width) for width in tensor.shape[1:])
        targets = torch.split(tensor, [part.stop - part.start for part in self._places])
        return [
            Box(target, (part, *others)) for target, part in zip(targets, self._places, strict=True)
        ]

    def _boxes_of_codes(self, coded: QuantizedLinear) -> list[Box]:
        (box,), found, first = coded.boxes("weight"), [], 0
        for part in self._places:
            place = (part, slice(0, self.inputs))
            found.append(msgspec.structs.replace(box, place=place, first=first))
            first += part.stop - part.start
        return found

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
        """This rank's rows; of codes, without the numbers."""
        coded = self.part.coded
        return self.part.weight if coded is None else coded.placeholder

    def quantize(self, make: MakeCodes) -> None:
        """As of `RowParallelLinear`."""
        self.part.quantize(make)

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
