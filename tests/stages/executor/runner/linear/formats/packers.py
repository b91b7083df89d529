"""Writers of quantised layers, from the definitions of the formats."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""AutoAWQ's output at each place of a word."""


class Integers(NamedTuple):
    """Weights as integers.

    Attributes:
        codes: `[outputs, inputs]`.
        zero_points: `[outputs, groups]`.
        scales: Likewise, float16.
        groups: The group of each input.
        bits: Bits of an integer.
    """

    codes: Tensor
    zero_points: Tensor
    scales: Tensor
    groups: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        """`[outputs, inputs]`, float32."""
        distances = self.codes - self.zero_points[:, self.groups]
        return self.scales.float()[:, self.groups] * distances


def random_integers(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    ordered: bool = True,
) -> Integers:
    """Return random weights whose zero points, if any, include 0 and the largest."""
    numbers = torch.Generator().manual_seed(bits + group)
    group = inputs if group == -1 else group
    groups = torch.arange(inputs) // group
    if not ordered:
        groups = groups[torch.randperm(inputs, generator=numbers)]
    count = int(groups.max()) + 1
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=numbers)
    zeros = torch.randint(0, 1 << bits, (outputs, count), generator=numbers)
    zeros[0], zeros[1] = 0, (1 << bits) - 1
    if symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    scales = (torch.rand(outputs, count, generator=numbers) + 0.5).half() / (1 << bits)
    return Integers(codes, zeros, scales, groups, bits)


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Return `[rows, n]` as words of 32 bits, one bit after the other, the lowest first."""
    each = (values.numpy()[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    flat = each.reshape(len(each), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view(np.int32))


def gptq(layer: Integers, *, subtract: bool, with_order: bool = True) -> dict[str, Tensor]:
    """Return a layer's tensors in GPTQ's layout."""
    zeros = layer.zero_points.T - int(subtract) & (1 << layer.bits) - 1
    tensors = {
        "qweight": pack_rows(layer.codes, layer.bits).T.contiguous(),
        "qzeros": pack_rows(zeros, layer.bits),
        "scales": layer.scales.T.contiguous(),
    }
    return tensors | ({"g_idx": layer.groups.int()} if with_order else {})


def awq(layer: Integers) -> dict[str, Tensor]:
    """Return a layer's tensors in AWQ's layout "gemm"."""

    def packed(rows: Tensor) -> Tensor:
        return pack_rows(rows.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    return {
        "qweight": packed(layer.codes.T),
        "qzeros": packed(layer.zero_points.T),
        "scales": layer.scales.T.contiguous(),
    }
