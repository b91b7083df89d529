"""GGUF: rows of blocks of 32 or 256 weights, each block with its scales before or after its codes.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...kernels.codes import Codes, PlainCodes, Scales

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""

_TABLE = tuple(value + 128 for value in IQ4)


class Kind(NamedTuple):
    """A type of quantised tensors.

    Attributes:
        read: Reads `[outputs, blocks, block_bytes]` of uint8.
        block: Weights of a block.
        block_bytes: Bytes of a block.
        bits: Bits of a code here, at least those in the file.
        group: Inputs that share a scale.
        zero: As of `Codes`.
        table: As of `Codes`.
    """

    read: Callable[[Tensor], PlainCodes]
    block: int
    block_bytes: int
    bits: Literal[4, 8]
    group: int
    zero: int = 0
    table: tuple[int, ...] = ()

    def form(self, outputs: int, inputs: int) -> Codes:
        """Return the form of a layer's codes."""
        return Codes(outputs, inputs, self.bits, self.group, self.zero, self.table)

    def plain(self, rows: Tensor) -> PlainCodes:
        """Return the codes of `[outputs, bytes]` uint8, rows of blocks as in the file."""
        return self.read(rows.view(len(rows), -1, self.block_bytes))


def _fields(codes: Tensor, bits: int, run: int) -> Tensor:
    """Unpack small numbers from bytes.

    Args:
        codes: `[..., bytes]`.
        bits: Bits of a number.
        run: Bytes whose lowest bits are consecutive numbers; the next bits are those that follow.

    Returns:
        `[..., numbers]`.
    """
    runs = codes.reshape(*codes.shape[:-1], -1, run)
    parts = codes.new_empty(*runs.shape[:-1], 8 // bits, run)
    for place in range(8 // bits):
        torch.bitwise_right_shift(runs, place * bits, out=parts[..., place, :])
    parts &= (1 << bits) - 1
    return parts.flatten(-3)


def _half(blocks: Tensor, place: int) -> Tensor:
    """Return the float16 number at a byte of each block, `[outputs, blocks]`."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0]


def _multiples(values: Tensor, factors: Tensor) -> Scales:
    """Return `[outputs, blocks, n]` multiples of each block's factor as scales."""
    return Scales(values.flatten(1).view(torch.int8), factors)


def _q8_0(blocks: Tensor) -> PlainCodes:
    # From two's complement to a code with its zero at 128.
    return PlainCodes(blocks[..., 2:].flatten(1) ^ 128, Scales(_half(blocks, 0)))


def _q4_0(blocks: Tensor) -> PlainCodes:
    return PlainCodes(_fields(blocks[..., 2:], 4, 16).flatten(1), Scales(_half(blocks, 0)))


def _q4_1(blocks: Tensor) -> PlainCodes:
    codes = _fields(blocks[..., 4:], 4, 16).flatten(1)
    return PlainCodes(codes, Scales(_half(blocks, 0)), Scales(-_half(blocks, 2)))


def _with_fifth(fifth: Tensor, four: Tensor) -> Tensor:
    return (_fields(four, 4, 16) | _fields(fifth, 1, 1) << 4).flatten(1)


def _q5_0(blocks: Tensor) -> PlainCodes:
    codes = _with_fifth(blocks[..., 2:6], blocks[..., 6:])
    return PlainCodes(codes, Scales(_half(blocks, 0)))


def _q5_1(blocks: Tensor) -> PlainCodes:
    codes = _with_fifth(blocks[..., 4:8], blocks[..., 8:])
    return PlainCodes(codes, Scales(_half(blocks, 0)), Scales(-_half(blocks, 2)))


def _q2_k(blocks: Tensor) -> PlainCodes:
    codes = _fields(blocks[..., 16:80], 2, 32).flatten(1)
    scales, offsets = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return PlainCodes(
        codes,
        _multiples(scales, _half(blocks, 80)),
        _multiples(offsets, _half(blocks, 82)),
    )


def _q3_k(blocks: Tensor) -> PlainCodes:
    third = _fields(blocks[..., :32], 1, 32)
    codes = (_fields(blocks[..., 32:96], 2, 32) | third << 2).flatten(1)
    low, high = _fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4)
    return PlainCodes(codes, _multiples((low | high << 4) - 32, _half(blocks, 108)))


def _scales_and_offsets(blocks: Tensor) -> tuple[Scales, Scales]:
    """Return those of Q4_K and Q5_K: 6 bits each, the upper two of half of them elsewhere."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 2 & 48), -1)
    return _multiples(scales, _half(blocks, 0)), _multiples(offsets, _half(blocks, 2))


def _q4_k(blocks: Tensor) -> PlainCodes:
    return PlainCodes(_fields(blocks[..., 16:], 4, 32).flatten(1), *_scales_and_offsets(blocks))


def _q5_k(blocks: Tensor) -> PlainCodes:
    fifth = _fields(blocks[..., 16:48], 1, 32)
    codes = (_fields(blocks[..., 48:], 4, 32) | fifth << 4).flatten(1)
    return PlainCodes(codes, *_scales_and_offsets(blocks))


def _q6_k(blocks: Tensor) -> PlainCodes:
    upper = _fields(blocks[..., 128:192], 2, 32)
    codes = (_fields(blocks[..., :128], 4, 64) | upper << 4).flatten(1)
    return PlainCodes(codes, _multiples(blocks[..., 192:208], _half(blocks, 208)))


def _iq4_xs(blocks: Tensor) -> PlainCodes:
    low, high = _fields(blocks[..., 4:8], 4, 1), _fields(blocks[..., 2:4], 2, 1)
    scales = _multiples((low | high << 4) - 32, _half(blocks, 0))
    return PlainCodes(_fields(blocks[..., 8:], 4, 16).flatten(1), scales)


KINDS = {
    "Q8_0": Kind(_q8_0, 32, 34, 8, 32, 128),
    "Q4_0": Kind(_q4_0, 32, 18, 4, 32, 8),
    "Q4_1": Kind(_q4_1, 32, 20, 4, 32),
    "Q5_0": Kind(_q5_0, 32, 22, 8, 32, 16),
    "Q5_1": Kind(_q5_1, 32, 24, 8, 32),
    "Q2_K": Kind(_q2_k, 256, 84, 4, 16),
    "Q3_K": Kind(_q3_k, 256, 110, 4, 16, 4),
    "Q4_K": Kind(_q4_k, 256, 144, 4, 32),
    "Q5_K": Kind(_q5_k, 256, 176, 8, 32),
    "Q6_K": Kind(_q6_k, 256, 210, 8, 16, 32),
    "IQ4_NL": Kind(_q4_0, 32, 18, 4, 32, 128, _TABLE),
    "IQ4_XS": Kind(_iq4_xs, 256, 136, 4, 32, 128, _TABLE),
}
"""The types that are read to codes, by GGUF's names. Others are unpacked."""
