"""Products with codes on CUDA, in Triton: weights are unpacked tile by tile, and never as a whole.

A program computes some rows for some outputs of a panel. It goes through all inputs in order, in
float32, so sums don't depend on the number of rows; only tensor cores may add within a tile in
another order for many rows than for few. Unverified on a device: tests run Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from .codes import PANEL, Codes
from .packed import Packed

_STEPS = 16
"""Words of an output per iteration, each with the codes of 4 or 8 inputs: a product's inner side is
at least 16."""

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a program. With few rows, a panel is shared by several programs, to fill the device."""

_FLOATS, _EXPONENTS, _MULTIPLES, _NONE = range(4)


@triton.jit
def _scales_at(values, factors, base, factor_base, group, lane, real, repeats, KIND: tl.constexpr):
    """`[steps, outputs]` float32: the scales, or offsets, of groups of a panel."""
    at = (base + group)[:, None] * 64 + lane[None, :]
    found = tl.load(values + at, mask=real[:, None], other=0)
    if KIND == 1:
        # 2 to the power of found - 127; of 0 it is a subnormal number.
        bits = found.to(tl.int32)
        bits = tl.where(bits == 0, 1 << 22, bits << 23)
        return bits.to(tl.float32, bitcast=True)
    scales = found.to(tl.float32)
    if KIND == 2:
        at = (factor_base + group // repeats)[:, None] * 64 + lane[None, :]
        scales *= tl.load(factors + at, mask=real[:, None], other=0.0).to(tl.float32)
    return scales


@triton.jit
def _read(
    words,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    panel,
    step,
    lane,
    steps,
    group_steps,
    groups,
    scale_repeats,
    scale_count,
    offset_repeats,
    offset_count,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """`[steps, outputs]` each: words of a panel's outputs, their scales, and offsets if any."""
    real = step < steps
    at = (panel * steps + step)[:, None] * 64 + lane[None, :]
    word = tl.load(words + at, mask=real[:, None], other=0)
    # Padding after the last group belongs to it.
    group = tl.minimum(step // group_steps, groups - 1)
    base = panel * groups
    first = panel * scale_count
    scale = _scales_at(scales, scale_factors, base, first, group, lane, real, scale_repeats, SCALES)
    offset = scale
    if OFFSETS != 3:
        first = panel * offset_count
        offset = _scales_at(
            offsets, offset_factors, base, first, group, lane, real, offset_repeats, OFFSETS
        )
    return word, scale, offset


@triton.jit
def _values(words, place: tl.constexpr, table, zero, BITS: tl.constexpr, TABLE: tl.constexpr):
    """float32 values of the codes at a place within words, without the zero."""
    if BITS == 8:
        codes = (words >> (8 * place)) & 255
    else:
        codes = (words >> (8 * (place % 4) + 4 * (place // 4))) & 15
    if TABLE:
        codes = tl.load(table + codes).to(tl.int32)
    return (codes - zero).to(tl.float32)


# Arguments that differ between calls are not specialised, so a layer's kernel is compiled once.
@triton.jit(do_not_specialize=["count", "stride"])
def _multiply(
    rows,
    words,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    table,
    bias,
    output,
    count,
    stride,
    inputs,
    outputs,
    steps,
    group_steps,
    groups,
    scale_repeats,
    scale_count,
    offset_repeats,
    offset_count,
    zero,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TABLE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """ROWS rows times OUTPUTS outputs of one panel."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    parts: tl.constexpr = 64 // OUTPUTS
    panel = (tl.program_id(0) // parts).to(tl.int64)
    lane = tl.program_id(0) % parts * OUTPUTS + tl.arange(0, OUTPUTS)
    per_word: tl.constexpr = 32 // BITS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, steps, STEPS):
        step = first + tl.arange(0, STEPS)
        word, scale, offset = _read(
            words,
            scales,
            scale_factors,
            offsets,
            offset_factors,
            panel,
            step,
            lane,
            steps,
            group_steps,
            groups,
            scale_repeats,
            scale_count,
            offset_repeats,
            offset_count,
            SCALES,
            OFFSETS,
        )
        for place in tl.static_range(per_word):
            weight = scale * _values(word, place, table, zero, BITS, TABLE)
            if OFFSETS != 3:
                weight -= offset
            column = step * per_word + place
            x = tl.load(
                rows + row[:, None] * stride + column[None, :],
                mask=(row < count)[:, None] & (column < inputs)[None, :],
                other=0.0,
            )
            total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    at = panel * 64 + lane
    if BIAS:
        total += tl.load(bias + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + at[None, :],
        total.to(output.dtype.element_ty),
        mask=(row < count)[:, None] & (at < outputs)[None, :],
    )


@triton.jit
def _unpack_rows(
    ids,
    words,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    table,
    output,
    inputs,
    steps,
    group_steps,
    groups,
    scale_repeats,
    scale_count,
    offset_repeats,
    offset_count,
    zero,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    TABLE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Some words of one output's weights."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(ids + row)
    panel = chosen // 64
    lane = (chosen % 64 + tl.arange(0, 1)).to(tl.int32)
    per_word: tl.constexpr = 32 // BITS
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    word, scale, offset = _read(
        words,
        scales,
        scale_factors,
        offsets,
        offset_factors,
        panel,
        step,
        lane,
        steps,
        group_steps,
        groups,
        scale_repeats,
        scale_count,
        offset_repeats,
        offset_count,
        SCALES,
        OFFSETS,
    )
    for place in tl.static_range(per_word):
        weight = scale * _values(word, place, table, zero, BITS, TABLE)
        if OFFSETS != 3:
            weight -= offset
        column = (step * per_word + place)[:, None]
        tl.store(
            output + row * inputs + column,
            weight.to(output.dtype.element_ty),
            mask=column < inputs,
        )


class _Weight:
    """The arguments of a weight of codes, read from the module at each call: updates may replace
    its tensors."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], form: Codes) -> None:
        self._parameters, self._form = parameters, form
        self._tables: dict[torch.device, Tensor] = {}
        self.constants: dict[str, Any] = {
            "BITS": form.bits,
            "SCALES": self._kind("scales"),
            "OFFSETS": self._kind("offsets"),
            "TABLE": bool(form.table),
        }

    def _found(self, name: str) -> Tensor | None:
        parameter = self._parameters.get(name)
        return None if parameter is None else parameter.data

    def _kind(self, name: str) -> int:
        values = self._found(name)
        if values is None:
            return _NONE
        if values.dtype is torch.uint8:
            return _EXPONENTS
        return _MULTIPLES if values.dtype is torch.int8 else _FLOATS

    def tensors(self) -> list[Tensor]:
        """Return words, scales, their factors, offsets, their factors, and table; any tensor in the
        place of those that there are not."""
        codes = self._found("codes")
        assert codes is not None
        words = codes.view(torch.int32)
        names = ("scales", "scale_factors", "offsets", "offset_factors")
        found = [self._found(name) for name in names]
        device = codes.device
        if self._form.table and device not in self._tables:
            table = torch.tensor(self._form.table, dtype=torch.int32, device=device)
            self._tables[device] = table
        found.append(self._tables.get(device))
        return [words, *(words if each is None else each for each in found)]

    def sizes(self) -> list[int]:
        """Return steps, steps of a group, groups, and groups per factor and factors of both."""
        form = self._form
        per_word = 32 // form.bits
        sizes = [form.padded_inputs // per_word, form.group // per_word, form.groups]
        for name in ("scale_factors", "offset_factors"):
            factors = self._found(name)
            count = 1 if factors is None else factors.shape[1]
            sizes += [-(-form.groups // count), count]
        return [*sizes, form.zero]


class Linear:
    """Rows times the weights of one layer."""

    def __init__(self, packed: Packed, *, wide: bool = False) -> None:
        """Take the layer.

        Args:
            packed: A layer with codes.
            wide: Whether results are float32.
        """
        assert packed.codes is not None
        self._packed, self._form, self._wide = packed, packed.codes, wide
        self._weight = _Weight(packed.parameters, packed.codes)

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[rows, inputs]`, each row contiguous, to `[rows, outputs]`, plus the residual if any."""
        form, count = self._form, rows.shape[0]
        bias = self._packed.parameters.get("bias")
        dtype = torch.float32 if self._wide else rows.dtype
        output = torch.empty(count, form.outputs, dtype=dtype, device=rows.device)
        tile, side = (_FEW_ROWS, 16) if count <= _FEW_ROWS else (_MANY_ROWS, PANEL)
        tensors = self._weight.tensors()
        # Triton launches on the current device, even if the tensors are on another.
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _multiply[form.panels * (PANEL // side), triton.cdiv(count, tile)](
                rows,
                *tensors,
                tensors[0] if bias is None else bias,
                output,
                count,
                rows.stride(0),
                form.inputs,
                form.outputs,
                *self._weight.sizes(),
                **self._weight.constants,
                BIAS=bias is not None,
                ROWS=tile,
                OUTPUTS=side,
                STEPS=_STEPS,
            )
        return output if residual is None else residual.add(output)


class Embedding:
    """Rows of a weight of codes, as an embedding's."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], form: Codes, dtype: torch.dtype
    ) -> None:
        """Take the weight: the tensors of `pack_plain`, in a module's dictionary, and the dtype of
        rows."""
        self._form, self._dtype = form, dtype
        self._weight = _Weight(parameters, form)

    def __call__(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., inputs]`."""
        form, flat = self._form, ids.flatten()
        output = torch.empty(len(flat), form.inputs, dtype=self._dtype, device=ids.device)
        steps = form.padded_inputs // (32 // form.bits)
        with torch.cuda.device_of(ids):  # type: ignore[no-untyped-call]
            _unpack_rows[len(flat), triton.cdiv(steps, PANEL)](
                flat,
                *self._weight.tensors(),
                output,
                form.inputs,
                *self._weight.sizes(),
                **self._weight.constants,
                STEPS=PANEL,
            )
        return output.view(*ids.shape, form.inputs)
