"""The definition of products with codes, in integers and float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nano_inference.stages.executor.runner.kernels.codes import (
    Codes,
    Numbers,
    PlainCodes,
    Scales,
    pack_plain,
)
from nano_inference.stages.executor.runner.kernels.packed import Packed


class Case(NamedTuple):
    """A form of codes to test; kinds of scales as in `random_layer`."""

    outputs: int
    inputs: int
    bits: int
    group: int
    zero: int = 0
    table: tuple[int, ...] = ()
    scales: str = "float32"
    offsets: str = ""
    numbers: Numbers = "integer"

    @property
    def form(self) -> Codes:
        form = self.outputs, self.inputs, self.bits, self.group, self.zero, self.table
        return Codes(*form, self.numbers)  # type: ignore[arg-type]


class Layer(NamedTuple):
    plain: PlainCodes
    packed: Packed

    def products(self, x: Tensor) -> Tensor:
        """`[rows, outputs]` float32, without bias."""
        return products(self.packed, self.plain, x)


def random_layer(
    case: Case, dtype: torch.dtype, *, activation_bits: int = 16, bias: bool = False, seed: int = 0
) -> Layer:
    """Return random codes. Kinds of scales are a dtype's name, and for int8 another one's."""
    generator = torch.Generator().manual_seed(seed)
    form = case.form

    def scales(kind: str, size: float) -> Scales:
        name, _, factor = kind.partition(" ")
        shape = form.outputs, form.groups
        if name == "uint8":
            drawn = torch.randint(112, 122, shape, generator=generator, dtype=torch.uint8)
            return Scales(drawn)
        if not factor:
            drawn = (torch.rand(shape, generator=generator) + 0.1) * size
            return Scales(drawn.to(getattr(torch, name)))
        drawn = torch.randint(-63, 64, shape, generator=generator, dtype=torch.int8)
        wide = torch.rand(form.outputs, -(-form.groups // 4), generator=generator) * size / 50
        return Scales(drawn, wide.to(getattr(torch, factor)))

    shape = form.outputs, form.inputs
    codes = torch.randint(0, 2**form.bits, shape, generator=generator, dtype=torch.uint8)
    offsets = scales(case.offsets, 0.1) if case.offsets else None
    plain = PlainCodes(codes, scales(case.scales, 0.01), offsets)
    own = torch.randn(form.outputs, generator=generator).to(dtype) if bias else None
    parameters = {**pack_plain(form, plain), "bias": own}
    packed = Packed(parameters, form.inputs, form.outputs, form, dtype, activation_bits)  # type: ignore[arg-type]
    return Layer(plain, packed)


def products(packed: Packed, plain: PlainCodes, x: Tensor) -> Tensor:
    """`[rows, outputs]` float32: sums of blocks, each an exact integer that is rounded once."""
    form = packed.codes
    assert form is not None
    numbers, units = _integers(x, form.block, packed.activation_bits, packed.dtype)
    codes = plain.codes.long()
    values = (torch.tensor(form.table)[codes] if form.table else codes) - form.zero
    blocks = numbers.shape[1]
    values = F.pad(values, (0, blocks * form.block - form.inputs)).unflatten(1, (blocks, -1))
    # In float64, which has these integers exactly.
    sums = torch.einsum("rbi,obi->bro", numbers.double(), values.double()).float()
    totals = numbers.sum(-1).float()
    starts = torch.arange(blocks) * form.block
    groups = (starts // min(form.group, form.padded_inputs)).clamp(max=form.groups - 1)
    total = torch.zeros(x.shape[0], form.outputs)
    for block, group in enumerate(groups):
        unit = units[:, block, None]
        total = _fma(sums[block], plain.scales.wide()[:, group] * unit, total)
        if plain.offsets is not None:
            offset = plain.offsets.wide()[:, group] * unit
            total = _fma(totals[:, block, None], -offset, total)
    return total


def _integers(x: Tensor, block: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `[rows, blocks, block]` int64, and the value of 1, `[rows, blocks]`."""
    x = F.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    largest = x.abs().amax(-1)
    broken = ~largest.isfinite()
    largest = largest.where(~broken, torch.ones(())).clamp(min=2.0**-100)
    if bits == 8:
        # Not 127 / largest, which torch rounds twice.
        factor, unit = torch.full_like(largest, 127) / largest, largest / 127
    else:
        shift = (21 if dtype is torch.float32 else 13) - (largest.frexp().exponent - 1)
        factor, unit = 2.0**shift, 2.0**-shift
    numbers = (x * factor[..., None]).round().where(~broken[..., None], torch.zeros(()))
    return numbers.long(), unit.where(~broken, torch.tensor(torch.nan))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once."""
    # The product is exact in float64. The sum is rounded to the neighbour with an odd last bit, so
    # that a second rounding has the result of one.
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    nearer = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    even = (bits & 1 == 0) & (error != 0) & total.isfinite()
    return nearer.where(even, bits).view(torch.float64).float()
