"""New weights of quantised layers: whole tensors, of which codes are made again."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.codes import PANEL, Codes, PlainCodes, Scales, pack_plain, unpack
from ..shards import Box, Held
from .rounding import Rounding, round_rows

_ROUNDED = 1 << 20
"""Numbers of a weight that are rounded at a time."""


class CodesBox(Box, frozen=True):
    """A part of a whole weight that is codes here.

    Codes are made of the weight in the model's dtype, as at load, so that an updated model has the
    bits of one that was loaded with the new weights.

    Attributes:
        target: The first of `tensors`.
        place: Outputs and inputs of the whole weight, after the expert's number if there is one.
        form: The form of `tensors`.
        tensors: Those of `pack_plain`.
        dtype: The model's.
        rounding: Makes the codes; None if they were read from a checkpoint.
        first: The part's first output in `tensors`.
        transposed: Whether the whole weight has inputs before outputs.
        order: The whole weight's input of each input here; None for the same.
    """

    form: Codes
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    rounding: Rounding | None
    first: int = 0
    transposed: bool = False
    order: Tensor | None = None

    @property
    def converts(self) -> bool:
        return True

    @property
    def fixed(self) -> str:
        if self.rounding is not None:
            return ""
        return "its codes were read from a checkpoint that was quantised before"

    def hold(self, whole: Tensor) -> Held:
        weight, lane = self._by_output(whole[self.place]), self.first % PANEL
        if lane or weight.shape[0] <= (count := self._count):
            return self._packed(weight, lane)
        pieces = [self._packed(piece, 0) for piece in torch.split(weight, count)]
        return {name: torch.cat([each[name] for each in pieces]) for name in pieces[0]}

    def put(self, part: Held) -> None:
        assert not isinstance(part, Tensor)
        self._put(part, self.first, self._outputs)

    def read(self) -> Tensor:
        weight = unpack(self.form, self.tensors).to(self.dtype)
        weight = weight[self.first : self.first + self._outputs]
        if self.order is not None:
            weight = weight.index_select(1, self.order.argsort())
        return (weight.t() if self.transposed else weight).reshape(self._shape)

    def write(self, part: Tensor, start: int = 0) -> None:
        if len(self.place) == 2 and not self.transposed:
            first, weight = self.first + start, part
        else:
            # A row of the whole weight is an expert here, or inputs.
            assert tuple(part.shape) == self._shape, "an expert comes as a whole"
            first, weight = self.first, self._by_output(part)
        for index in range(0, weight.shape[0], self._count):
            piece = weight[index : index + self._count]
            packed = self._packed(piece, (first + index) % PANEL)
            self._put(packed, first + index, piece.shape[0])

    @property
    def _count(self) -> int:
        """Outputs that are rounded at a time."""
        return max(_ROUNDED // self.form.inputs // PANEL, 1) * PANEL

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.place)

    @property
    def _outputs(self) -> int:
        return self._shape[-1 if self.transposed else -2]

    def _by_output(self, part: Tensor) -> Tensor:
        weight = part[0] if len(self.place) > 2 else part
        return weight.t() if self.transposed else weight

    def _packed(self, weight: Tensor, lane: int) -> dict[str, Tensor]:
        """Return the panels of some outputs, of which the first is `lane` of the first panel."""
        assert self.rounding is not None, self.fixed
        plain = round_rows(weight.to(self.target.device, self.dtype), self.rounding)
        form = msgspec.structs.replace(self.form, outputs=lane + weight.shape[0])
        return pack_plain(form, _after(plain, lane) if lane else plain)

    def _put(self, packed: Mapping[str, Tensor], first: int, outputs: int) -> None:
        panel, lane = divmod(first, PANEL)
        is_last = first + outputs == self.form.outputs
        for name, tensor in self.tensors.items():
            own, new = tensor[panel : panel + packed[name].shape[0]], packed[name]
            if not lane and (is_last or outputs % PANEL == 0):
                own.copy_(new)
                continue
            # `[panels, n, PANEL, ...]` to lanes in the order of outputs.
            lanes = torch.arange(own.shape[0] * PANEL, device=own.device).view(-1, PANEL)
            chosen = (lanes >= lane) & (lanes < lane + outputs)
            own.transpose(1, 2)[chosen] = new.transpose(1, 2)[chosen]


def _after(plain: PlainCodes, lane: int) -> PlainCodes:
    """Return the codes after those of `lane` outputs of zeros."""

    def below(rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, lane, 0))

    def scales(own: Scales | None) -> Scales | None:
        if own is None:
            return None
        return Scales(below(own.values), None if own.factors is None else below(own.factors))

    found = scales(plain.scales)
    assert found is not None
    return PlainCodes(below(plain.codes), found, scales(plain.offsets))
