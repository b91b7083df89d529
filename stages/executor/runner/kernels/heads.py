"""The products of `heads.h` as a function of CPU tensors: a matrix for each head."""

from __future__ import annotations

import ctypes
from ctypes import c_long, c_void_p

from torch import Tensor

from . import cpu


class _HeadProducts(ctypes.Structure):
    _fields_ = (
        ("matrices", c_void_p),
        ("head_stride", c_long),
        ("heads", c_long),
        ("inputs", c_long),
        ("outputs", c_long),
        ("across", c_long),
    )


class _HeadRows(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_token", c_long),
        ("x_head", c_long),
        ("out_token", c_long),
        ("out_head", c_long),
    )


def head_products(rows: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Multiply each head's rows with a matrix of its own.

    Args:
        rows: `[tokens, heads, inputs]`, the last dimension contiguous.
        matrices: `[heads, inputs, outputs]`, each contiguous, or its transpose.
        out: `[tokens, heads, outputs]` for the products, the last dimension contiguous.

    Raises:
        ValueError: The layout or a dtype is another one.
    """
    heads, inputs, outputs = matrices.shape
    along = matrices.stride()[1:] == (outputs, 1)
    across = not along and matrices.stride()[1:] == (1, inputs)
    if not (along or across) or rows.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"matrices of {tuple(matrices.shape)} by {matrices.stride()}")
    if not rows.dtype is matrices.dtype is out.dtype:
        raise ValueError(f"{rows.dtype} rows and {out.dtype} products for {matrices.dtype}")
    products = _HeadProducts(
        matrices.data_ptr(), matrices.stride(0), heads, inputs, outputs, across
    )
    where = _HeadRows(rows.data_ptr(), out.data_ptr(), *rows.stride()[:2], *out.stride()[:2])
    run = cpu.library(rows.dtype).head_products
    run(ctypes.addressof(products), ctypes.addressof(where), rows.shape[0])
