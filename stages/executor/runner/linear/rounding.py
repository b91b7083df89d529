"""Weights to codes, rounded at load.

Codes are computed with the scale that is stored, a bfloat16: it has float32's range and half its
bytes, and the files of `nano-inference quantize` and what reads them have the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import torch
from torch import Tensor

from .codes import PANEL, Codes, PlainCodes, Scales, pack_plain

_SLAB = 1 << 20
"""Numbers that are rounded at a time, 4 MiB in float32, so that temporary tensors are small."""


class Rounding(msgspec.Struct, frozen=True):
    """The form of codes that are made at load.

    Attributes:
        bits: Bits of a code.
        group: Inputs that share a scale; 0 for one scale per output.
        zero_points: Whether each group has a zero point of its own; without, codes are symmetric.
    """

    bits: Literal[4, 8]
    group: int = 0
    zero_points: bool = False

    def form(self, outputs: int, inputs: int) -> Codes:
        """Return the form of a layer's codes."""
        group = self.group or -(-inputs // 8) * 8
        return Codes(outputs, inputs, self.bits, group, 1 << (self.bits - 1))


def round_weight(weight: Tensor, rounding: Rounding) -> tuple[Codes, dict[str, Tensor]]:
    """Return codes of a weight, `[outputs, inputs]`, packed as by `pack_plain`.

    Raises:
        ValueError: The weight has numbers that are infinite or not numbers.
    """
    form = rounding.form(*weight.shape)
    packed: dict[str, Tensor] = {}
    for start, rows in _slabs(weight):
        own = msgspec.structs.replace(form, outputs=rows.shape[0])
        part = pack_plain(own, round_rows(rows, rounding))
        for name, tensor in part.items():
            if name not in packed:
                packed[name] = tensor.new_empty(form.panels, *tensor.shape[1:])
            packed[name][start // PANEL :][: len(tensor)] = tensor
    return form, packed


def _slabs(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    count = max(_SLAB // weight.shape[1] // PANEL, 1) * PANEL
    for start in range(0, weight.shape[0], count):
        yield start, weight[start : start + count]


def round_rows(rows: Tensor, rounding: Rounding) -> PlainCodes:
    """Return codes of some outputs' weights, `[outputs, inputs]`, of any floating-point dtype.

    Each output is rounded by itself, so that parts of a weight have the codes of the whole.

    Raises:
        ValueError: As `round_weight`.
    """
    form = rounding.form(*rows.shape)
    padding = form.groups * form.group - form.inputs
    # Padded with a number of the group, so that zeros don't widen the range.
    wide = torch.nn.functional.pad(rows.float(), (0, padding))
    groups = wide.view(form.outputs, form.groups, form.group)
    highest, lowest = groups.amax(-1), groups.amin(-1)
    if not (highest - lowest).isfinite().all() and not rows.isfinite().all():
        raise ValueError("it has numbers that are infinite or not numbers")
    most = (1 << form.bits) - 1
    if rounding.zero_points:
        # The range includes 0, so that padding and weights of 0 are exact.
        highest, lowest = highest.clamp(min=0), lowest.clamp(max=0)
        scales = _stored(highest / most - lowest / most)
        zeros = (-lowest / _divisor(scales)).round_().clamp_(0, most)
        offsets = Scales(scales.float() * (zeros - form.zero))
    else:
        # 8 bits: from -127 to 127. 4 bits use -8, too.
        low = -(form.zero - (form.bits == 8))
        scales = _stored(torch.maximum(highest / (form.zero - 1), lowest / low))
        zeros, offsets = torch.full_like(scales, form.zero, dtype=torch.float32), None
    codes = groups.div(_divisor(scales)[..., None]).round_().add_(zeros[..., None])
    codes = codes.clamp_(0 if form.bits == 4 or rounding.zero_points else 1, most)
    plain = codes.to(torch.uint8).flatten(1)[:, : form.inputs]
    return PlainCodes(plain, Scales(scales), offsets)


def _stored(scales: Tensor) -> Tensor:
    return scales.to(torch.bfloat16)


def _divisor(scales: Tensor) -> Tensor:
    """The scales in float32, and 1 for 0: a group of zeros."""
    return torch.where(scales == 0, 1, scales.float())
