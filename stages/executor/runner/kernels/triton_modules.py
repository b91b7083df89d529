"""Parts of decoder layers on CUDA: norm, rotation and gate in Triton, products by PyTorch.

As separate operations of PyTorch they are most of the kernels of a decode step, and most of its
time with a small batch. The names are those of `cpu`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cpu
from .cpu import LinearKind

_GATE_BLOCK = 1024
"""Numbers per program."""


@triton.jit(do_not_specialize=["stride", "epsilon"])
def _norm_rows(
    rows,
    weight,
    output,
    stride,
    epsilon,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """RMSNorm of one row of WIDTH; INNER of them lie side by side in every `stride`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    at = row // INNER * stride + row % INNER * WIDTH + column
    x = tl.load(rows + at, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    if SHIFTED:
        x *= 1.0 + factor
    else:
        x = x.to(output.dtype.element_ty).to(tl.float32) * factor
    tl.store(output + row * WIDTH + column, x.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["stride"])
def _rotate_heads(
    rows,
    cos,
    sin,
    stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Rotate all heads of one row, in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    column = tl.arange(0, PADDED_HALF)[None, :]
    real = (head < HEADS) & (column < HALF)
    low = rows + row * stride + head * (2 * HALF) + column
    at = row * (2 * HALF) + column
    inside = column < HALF
    first = tl.load(low, mask=real, other=0.0).to(tl.float32)
    second = tl.load(low + HALF, mask=real, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + at + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = rows.dtype.element_ty
    tl.store(low, (first * cos_low - second * sin_low).to(kind), mask=real)
    tl.store(low + HALF, (second * cos_high + first * sin_high).to(kind), mask=real)


@triton.jit(do_not_specialize=["stride"])
def _gate_numbers(
    gates, ups, output, stride, WIDTH: tl.constexpr, TANH_GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """act(gates) * ups, of rows of WIDTH numbers that lie `stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    kind = gates.dtype.element_ty
    x = tl.load(gates + row * stride + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride + column, mask=real, other=0.0).to(tl.float32)
    if TANH_GELU:
        # tanh(z) = 2 sigmoid(2z) - 1, so that gelu(x) = x * sigmoid(2z).
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x *= tl.sigmoid(x)
    gated = (x.to(kind).to(tl.float32) * up).to(kind)
    tl.store(output + row * WIDTH + column, gated, mask=real)


class RMSNorm(cpu.RMSNorm):
    """RMS normalisation of CUDA tensors; see `cpu.RMSNorm`."""

    def __call__(self, rows: Tensor) -> Tensor:
        weight = self.weight_for(rows)
        width = rows.shape[-1]
        inner = rows.shape[-2] if rows.dim() > 2 else 1
        rows = rows if _has_dense_rows(rows) else rows.contiguous()
        output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _norm_rows[(rows.numel() // width,)](
                rows,
                weight,
                output,
                rows.stride(-3) if rows.dim() > 2 else rows.stride(0),
                self.epsilon,
                INNER=inner,
                WIDTH=width,
                PADDED=triton.next_power_of_2(width),
                SHIFTED=self.shifted,
                num_warps=8 if width > 2048 else 4,
            )
        return output


def _has_dense_rows(rows: Tensor) -> bool:
    """Whether one stride leads from one group of adjacent rows to the next."""
    if rows.dim() == 2:
        return rows.stride(1) == 1
    dense = rows.stride(-1) == 1 and rows.stride(-2) == rows.shape[-1]
    return dense and all(size == 1 for size in rows.shape[:-3])


def rotate(rows: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary embeddings to CUDA tensors; see `cpu.rotate`."""
    count, width = cos.shape
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _rotate_heads[(count,)](
            rows,
            cos,
            sin,
            rows.stride(0),
            HEADS=heads,
            HALF=width // 2,
            PADDED_HEADS=triton.next_power_of_2(heads),
            PADDED_HALF=triton.next_power_of_2(width // 2),
        )


def gate(gates: Tensor, ups: Tensor, kind: LinearKind) -> Tensor:
    """Return the gated product in a new tensor; see `cpu.gate`. `[rows, width]`, rows contiguous
    and equally far apart.
    """
    count, width = gates.shape
    output = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    with torch.cuda.device_of(gates):  # type: ignore[no-untyped-call]
        _gate_numbers[count, triton.cdiv(width, _GATE_BLOCK)](
            gates,
            ups,
            output,
            gates.stride(0),
            WIDTH=width,
            TANH_GELU=kind == LinearKind.GATED_TANH_GELU,
            BLOCK=_GATE_BLOCK,
        )
    return output
