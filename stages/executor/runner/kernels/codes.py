"""Quantised weights: codes of 8 or 4 bits, their scales by group, and their layout for kernels.

A weight is `scale * (value - zero) - offset`, where `value` is its code, or a table's entry for it.
Scales and offsets hold for an output and a group of consecutive inputs. Every format that is read
or made here is of this form, so kernels know no format's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ..system_memory import HUGE_PAGE, zeros
from .layout import put_codes, put_weights

PANEL = 64
"""Outputs that are stored side by side, so that kernels read memory in order."""

STEP = 4
"""Neighbouring inputs of one output that are stored together: what one instruction sums."""

Numbers = Literal["integer", "float8_e4m3fn"]


class Scales(NamedTuple):
    """Numbers for each output and group of inputs.

    Attributes:
        values: `[outputs, groups]` of float32, float16 or bfloat16; of uint8, exponents: 2 to the
            power of value - 127; or of int8, multiples of `factors`.
        factors: `[outputs, ceil(groups / n)]` of float16 or float32, each for `n` consecutive
            groups, where values are int8; else None.
    """

    values: Tensor
    factors: Tensor | None = None

    def wide(self) -> Tensor:
        """Return the numbers as float32, exactly."""
        if self.values.dtype is torch.uint8:
            # Exact at both ends, where an exponent makes float32's subnormal numbers.
            one = torch.ones((), device=self.values.device).expand(self.values.shape)
            return torch.ldexp(one, self.values.int() - 127)
        if self.factors is None:
            return self.values.float()
        groups, factors = self.values.shape[-1], self.factors.shape[-1]
        repeated = self.factors.float().repeat_interleave(-(-groups // factors), -1)
        return self.values.float() * repeated[..., :groups]


class Codes(msgspec.Struct, frozen=True):
    """The form of one layer's codes.

    Attributes:
        outputs: Output features.
        inputs: Input features.
        bits: Bits of a code: 8 or 4.
        group: Inputs that share a scale, a multiple of 8; the last group may be cut off. At least
            `inputs` for one scale per output.
        zero: Subtracted from the values.
        table: Values of the 16 codes of 4 bits, from 0 to 255; () for the codes themselves.
        numbers: "integer", or codes of 8 bits that are floating-point numbers.
    """

    outputs: int
    inputs: int
    bits: Literal[4, 8]
    group: int
    zero: int = 0
    table: tuple[int, ...] = ()
    numbers: Numbers = "integer"

    @property
    def name(self) -> str:
        """A short name: numbers and bits of the codes, and the inputs of a group if a scale is not
        for all: "int4-128"."""
        kind = "fp" if self.numbers != "integer" else "table" if self.table else "int"
        return f"{kind}{self.bits}" + (f"-{self.group}" if self.groups > 1 else "")

    @property
    def groups(self) -> int:
        """Groups of inputs."""
        return -(-self.inputs // self.group)

    @property
    def block(self) -> int:
        """Inputs whose products kernels add before they scale: a part of a group.

        At most 128 values below 256 times activations of 15 bits fit a sum of 32 bits.
        """
        if self.group >= self.inputs:
            return min(128, -(-self.inputs // 8) * 8)
        return max(each for each in range(8, 129, 8) if self.group % each == 0)

    @property
    def padded_inputs(self) -> int:
        """Inputs with padding to whole groups, or to whole blocks of one group."""
        unit = self.group if self.group < self.inputs else self.block
        return -(-self.inputs // unit) * unit

    @property
    def panels(self) -> int:
        """Panels of outputs."""
        return -(-self.outputs // PANEL)


class PlainCodes(NamedTuple):
    """One layer's weights as formats are read to, and as `round_weight` makes them.

    Attributes:
        codes: `[outputs, inputs]` uint8, one code each also of 4 bits.
        scales: For `[outputs, groups]`.
        offsets: Likewise; None for zeros.
    """

    codes: Tensor
    scales: Scales
    offsets: Scales | None = None


def unpack_plain(form: Codes, plain: PlainCodes) -> Tensor:
    """Return the weights, `[outputs, inputs]` float32, exactly."""
    if form.numbers == "float8_e4m3fn":
        values = plain.codes.view(torch.float8_e4m3fn).float()
    elif form.table:
        table = torch.tensor(form.table, dtype=torch.float32, device=plain.codes.device)
        values = table[plain.codes.int()] - form.zero
    else:
        values = plain.codes.float() - form.zero

    def of_inputs(scales: Scales) -> Tensor:
        return scales.wide().repeat_interleave(form.group, -1)[..., : form.inputs]

    weights = of_inputs(plain.scales) * values
    return weights if plain.offsets is None else weights - of_inputs(plain.offsets)


def pack_plain(form: Codes, plain: PlainCodes) -> dict[str, Tensor]:
    """Return the tensors that kernels read, each with `panels` as its first dimension.

    Returns:
        "codes", `[panels, padded_inputs / 4, PANEL, 4]` uint8; of 4 bits `[panels,
        padded_inputs / 8, PANEL, 4]`, where of 8 neighbouring inputs the first four are in the low
        halves. "scales", `[panels, groups, PANEL]`, and, where there are such, "scale_factors",
        "offsets" and "offset_factors" likewise. Padded weights are meaningless:
        activations are 0 there, and outputs are dropped.
    """
    packed: dict[str, Tensor] = {}
    put_plain(packed, form, plain)
    return packed


def put_plain(packed: dict[str, Tensor], form: Codes, plain: PlainCodes, start: int = 0) -> None:
    """Pack some outputs into the tensors of all, which are allocated in large pages.

    Args:
        packed: As `pack_plain` returns them; {} at first.
        form: The form of all outputs.
        plain: The codes of some of them.
        start: Their first output; a multiple of `PANEL`.
    """
    own = msgspec.structs.replace(form, outputs=len(plain.codes))
    part = slice(start // PANEL, start // PANEL + own.panels)

    def place(name: str, tail: tuple[int, ...], like: Tensor) -> Tensor:
        if name not in packed:
            shape, huge = (form.panels, *tail), math.prod(tail) * form.panels * like.itemsize
            packed[name] = (
                zeros(shape, like.dtype, like.device, huge=True)
                if huge >= HUGE_PAGE
                else like.new_empty(shape)
            )
        return packed[name][part]

    steps = form.padded_inputs * form.bits // 8 // STEP
    _put_codes(own, plain.codes, place("codes", (steps, PANEL, STEP), plain.codes))
    for name, scales in (("scale", plain.scales), ("offset", plain.offsets)):
        for end, rows in (("s", scales and scales.values), ("_factors", scales and scales.factors)):
            if rows is not None:
                panels = _by_panel(rows, own.panels)
                place(f"{name}{end}", panels.shape[1:], rows).copy_(panels)


def _put_codes(form: Codes, codes: Tensor, packed: Tensor) -> None:
    if put_codes(codes, form.padded_inputs, form.bits, packed):
        return
    codes = F.pad(codes, (0, form.padded_inputs - form.inputs)).contiguous()
    if form.bits == 4:
        codes = codes.view(form.outputs, -1, 2, STEP)
        codes = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    # Four bytes that stay together move as one number.
    packed.view(torch.int32)[..., 0] = _by_panel(codes.view(torch.int32), form.panels)


def unpack(
    form: Codes, tensors: Mapping[str, Tensor], start: int = 0, stop: int | None = None
) -> Tensor:
    """Return weights that `pack_plain` packed, exactly.

    Args:
        form: Their form.
        tensors: The tensors.
        start: First output; a multiple of `PANEL`.
        stop: End of the outputs; None for all.

    Returns:
        `[stop - start, inputs]` float32.
    """
    stop = form.outputs if stop is None else stop
    part = slice(start // PANEL, -(-stop // PANEL))
    own = msgspec.structs.replace(form, outputs=stop - start)
    parts = {name: each[part] for name, each in tensors.items()}
    scales, offsets = _scales_of(own, parts)
    wide = None if offsets is None else offsets.wide()
    codes, weights = parts["codes"], torch.empty(own.outputs, own.inputs)
    form_of = own.padded_inputs, own.bits, _values(own), own.zero
    if put_weights(codes, *form_of, scales.wide(), wide, own.group, weights):
        return weights
    return unpack_plain(own, PlainCodes(_codes_of(own, codes), scales, offsets))


def unpack_rows(form: Codes, tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Return the weights of some outputs, `[rows, inputs]` float32, exactly.

    Args:
        form: The form of the weights.
        tensors: As `pack_plain` returns them.
        rows: The outputs, `[rows]`.
    """
    panels, lanes = rows // PANEL, rows % PANEL
    codes = tensors["codes"][panels, :, lanes]  # [rows, steps, STEP]
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2)

    def scales(name: str) -> Scales | None:
        values, factors = tensors.get(f"{name}s"), tensors.get(f"{name}_factors")
        if values is None:
            return None
        wanted = None if factors is None else factors[panels, :, lanes]
        return Scales(values[panels, :, lanes], wanted)

    found = scales("scale")
    assert found is not None
    plain = PlainCodes(codes.flatten(1)[:, : form.inputs], found, scales("offset"))
    return unpack_plain(form, plain)


def _values(form: Codes) -> Tensor | None:
    """Return the values of all codes; None for the codes themselves."""
    if form.numbers == "float8_e4m3fn":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor(form.table, dtype=torch.float32) if form.table else None


def _codes_of(form: Codes, packed: Tensor) -> Tensor:
    # Four bytes that stay together move as one number.
    steps = packed.view(torch.int32).squeeze(-1)
    codes = _copied(_by_output(steps, form.outputs)).view(torch.uint8)
    if form.bits == 4:
        halves = codes.view(form.outputs, -1, 1, STEP)
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    return codes[:, : form.inputs]


def _scales_of(form: Codes, tensors: Mapping[str, Tensor]) -> tuple[Scales, Scales | None]:
    def scales(name: str) -> Scales | None:
        values, factors = tensors.get(f"{name}s"), tensors.get(f"{name}_factors")
        if values is None:
            return None
        wanted = None if factors is None else _by_output(factors, form.outputs)
        return Scales(_by_output(values, form.outputs), wanted)

    found = scales("scale")
    assert found is not None
    return found, scales("offset")


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy whose last dimension has a stride of 1, of one number too."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _by_panel(rows: Tensor, panels: int) -> Tensor:
    """`[outputs, n]` to `[panels, n, PANEL]`."""
    padding = panels * PANEL - rows.shape[0]
    return F.pad(rows, (0, 0, 0, padding)).view(panels, PANEL, rows.shape[1]).transpose(1, 2)


def _by_output(panels: Tensor, outputs: int) -> Tensor:
    """`[panels, n, PANEL]` to `[outputs, n]`."""
    return panels.transpose(1, 2).flatten(0, 1)[:outputs]
