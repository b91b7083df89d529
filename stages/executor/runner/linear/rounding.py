"""Weights to codes, rounded at load.

Codes are computed with the scale that is stored, a bfloat16: it has float32's range and half its
bytes, and the files of `nano-inference quantize` and what reads them have the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.codes import PANEL, Codes, PlainCodes, Scales, put_plain

_SLAB = 1 << 18
"""Numbers that are rounded at a time, 1 MiB in float32, so that temporary tensors are small."""

_SHARES = (1.0, 0.9, 0.8)
"""Shares of a group's range whose errors are compared, for 4 bits: numbers beyond a share are cut
off, and the others have finer steps. Normal weights in groups of 128 have 12 % less error than with
the whole range and scales of one sign; more shares give 1 % more."""


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
        put_plain(packed, form, round_rows(rows, rounding), start)
    return form, packed


def _slabs(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    count = max(_SLAB // weight.shape[1] // PANEL, 1) * PANEL
    for start in range(0, weight.shape[0], count):
        yield start, weight[start : start + count]


def round_rows(rows: Tensor, rounding: Rounding) -> PlainCodes:
    """Return codes of some outputs' weights, `[outputs, inputs]`, of any floating-point dtype.

    Each output is rounded by itself, so that parts of a weight have the codes of the whole. Of 4
    bits, each group has the range with the least squared error among some shares of its own.

    Raises:
        ValueError: As `round_weight`.
    """
    form = rounding.form(*rows.shape)
    padding = form.groups * form.group - form.inputs
    groups = F.pad(rows.float(), (0, padding)).view(form.outputs, form.groups, form.group)
    highest, lowest = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    if not (highest.isfinite().all() and lowest.isfinite().all()):
        raise ValueError("it has numbers that are infinite or not numbers")
    shares = _SHARES if form.bits == 4 else (1.0,)
    grids = [_grid(form, highest * each, lowest * each, rounding) for each in shares]
    chosen = grids[0]
    if len(grids) > 1:
        least = _squared_error(form, groups, chosen)
        for grid in grids[1:]:
            error = _squared_error(form, groups, grid)
            better = error < least
            least = torch.where(better, error, least)
            chosen = _Grid(*(torch.where(better, *pair) for pair in zip(grid, chosen, strict=True)))
    codes = _codes(form, groups, chosen).to(torch.uint8).flatten(1)[:, : form.inputs]
    scales, zeros = chosen.scales.squeeze(-1), chosen.zeros.squeeze(-1)
    # Float32: a bfloat16 hasn't the digits of a scale times a zero point.
    offsets = Scales(scales.float() * (zeros - form.zero)) if rounding.zero_points else None
    return PlainCodes(codes, Scales(scales), offsets)


class _Grid(NamedTuple):
    """The numbers that each group's codes stand for: `scales * (code - zeros)`."""

    scales: Tensor
    zeros: Tensor


def _grid(form: Codes, highest: Tensor, lowest: Tensor, rounding: Rounding) -> _Grid:
    """Return the grids that reach the extremes of each group, `[outputs, groups, 1]` each."""
    most = (1 << form.bits) - 1
    if rounding.zero_points:
        # The range includes 0, so that padding and weights of 0 are exact.
        highest, lowest = highest.clamp(min=0), lowest.clamp(max=0)
        scales = (highest / most - lowest / most).to(torch.bfloat16)
        return _Grid(scales, (-lowest / _divisor(scales)).round_().clamp_(0, most))
    if form.bits == 8:
        scales = torch.maximum(highest, -lowest) / (form.zero - 1)
    else:
        # There is one negative code more than positive ones, which the largest number gets: the
        # scale has the opposite sign.
        scales = torch.where(highest > -lowest, highest, lowest) / -form.zero
    scales = scales.to(torch.bfloat16)
    return _Grid(scales, torch.full_like(scales, form.zero, dtype=torch.float32))


def _codes(form: Codes, groups: Tensor, grid: _Grid) -> Tensor:
    """Return the codes as float32."""
    codes = groups.div(_divisor(grid.scales)).round_().add_(grid.zeros)
    return codes.clamp_(0, (1 << form.bits) - 1)


def _squared_error(form: Codes, groups: Tensor, grid: _Grid) -> Tensor:
    found = _codes(form, groups, grid).sub_(grid.zeros).mul_(grid.scales.float())
    return found.sub_(groups).square_().sum(-1, keepdim=True)


def _divisor(scales: Tensor) -> Tensor:
    """The scales in float32, and 1 for 0: a group of zeros."""
    return torch.where(scales == 0, 1, scales.float())
