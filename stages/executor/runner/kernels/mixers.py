"""The kernels of `mixers.c` as operators with recurrent state, on CPU tensors.

A library is compiled when a model with such operators is first loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..fixed_tiles import elementwise
from . import cpu
from .compile import (
    MIXERS_BFLOAT16,
    MIXERS_BFLOAT16_AVX2,
    MIXERS_FLOAT32,
    MIXERS_FLOAT32_AVX2,
    Library,
    digest_of,
)

if TYPE_CHECKING:
    from ..mixers.operators import Segments

_LIBRARIES: dict[torch.dtype, tuple[Library, ...]] = {
    torch.bfloat16: (MIXERS_BFLOAT16, MIXERS_BFLOAT16_AVX2),
    torch.float32: (MIXERS_FLOAT32, MIXERS_FLOAT32_AVX2),
}
_SIGNATURES = {"recur": "pp", "convolve": "pplpp", "scan": "pp"}

_MOST_TAPS = 8
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the library for activations of a dtype, with its functions declared.

    Raises:
        KernelsUnavailable: There is none, or none on this machine.
    """
    return cpu.first_usable(_LIBRARIES.get(dtype, ()), _SIGNATURES, f"{dtype} on cpu")[1]


class _Segments(ctypes.Structure):
    _fields_ = (
        ("first", c_void_p),
        ("count", c_void_p),
        ("slot", c_void_p),
        ("save", c_void_p),
        ("segments", c_long),
    )


class _Recurrence(ctypes.Structure):
    _fields_ = (
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_stride", c_long),
        ("key_stride", c_long),
        ("value_stride", c_long),
        ("decays", c_void_p),
        ("decay_stride", c_long),
        ("betas", c_void_p),
        ("factors", c_void_p),
        ("residual", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("groups", c_long),
        ("heads", c_long),
        ("key_width", c_long),
        ("value_width", c_long),
        ("by_channel", c_long),
        ("wide", c_long),
        ("logarithms", c_long),
        ("normalised", c_long),
        ("scale", c_float),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("windows", c_void_p),
        ("channels", c_long),
        ("taps", c_long),
        ("activated", c_long),
    )


class _Scan(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("steps", c_void_p),
        ("in", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_long),
        ("step_stride", c_long),
        ("in_stride", c_long),
        ("out_stride", c_long),
        ("rates", c_void_p),
        ("residual", c_void_p),
        ("state", c_void_p),
        ("result", c_void_p),
        ("channels", c_long),
        ("width", c_long),
    )


class KernelOperators:
    """The operators of `mixers.operators` for activations of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Load the library.

        Raises:
            KernelsUnavailable: There is none, or none on this machine.
        """
        self._library = library(dtype)
        self.code = digest_of(self._library).hex()[:16]
        self._dtype = dtype
        self._segments: Segments | None = None
        self._run = _Segments()

    def _segments_of(self, segments: Segments) -> int:
        """Return the address of the kernels' argument, kept for the layers of a step."""
        if self._segments is not segments:
            self._segments = segments
            columns = segments.first, segments.count, segments.slot, segments.save
            for name, column in zip(("first", "count", "slot", "save"), columns, strict=True):
                assert column.flags.c_contiguous
                setattr(self._run, name, column.ctypes.data)
            self._run.segments = len(segments.first)
        return ctypes.addressof(self._run)

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        window: Tensor,
        segments: Segments,
    ) -> Tensor:
        self._check(x, weight, bias, window)
        channels, taps = weight.shape
        if not 2 <= taps <= _MOST_TAPS:
            raise ValueError(f"a convolution over {taps} tokens; the kernel has 2 to {_MOST_TAPS}")
        argument = _Convolution(
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            windows=window.data_ptr(),
            channels=channels,
            taps=taps,
            activated=_ACTIVATIONS.get(activation, False),
        )
        output = torch.empty(x.shape, dtype=self._dtype)
        self._library.convolve(
            ctypes.addressof(argument),
            x.data_ptr(),
            x.stride(0),
            output.data_ptr(),
            self._segments_of(segments),
        )
        if activation not in _ACTIVATIONS:
            output = elementwise(ACT2FN[activation], output)
        return output

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        l2norm: bool,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        betas = beta.float()
        options = {"betas": betas, "by_channel": g.dim() == 3}
        return self._recur(
            q, k, v, g, state, segments, scale=scale, normalised=l2norm, logarithms=True, **options
        )

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        times = dt.float()
        options = {"factors": times, "residual": None if D is None else D.float()}
        decays = times * A
        return self._recur(C, B, x, decays, state, segments, logarithms=True, wide=True, **options)

    def lightning(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        return self._recur(q, k, v, decay.expand(len(q), -1), state, segments)

    def _recur(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decays: Tensor,
        state: Tensor,
        segments: Segments,
        *,
        betas: Tensor | None = None,
        factors: Tensor | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        **options: bool,
    ) -> Tensor:
        """Run the kernel of heads with states `[slots, heads, key_width, value_width]`."""
        self._check(queries, keys, values)
        tokens, heads, width = values.shape
        assert decays.dtype is state.dtype is torch.float32
        assert state.is_contiguous()
        dtype = torch.float32 if options.get("wide") else self._dtype
        output = torch.empty(tokens, heads, width, dtype=dtype)
        scalars = {"betas": betas, "factors": factors, "residual": residual}
        argument = _Recurrence(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            query_stride=queries.stride(0),
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            decays=decays.data_ptr(),
            decay_stride=decays.stride(0),
            state=state.data_ptr(),
            out=output.data_ptr(),
            groups=keys.shape[1],
            heads=heads,
            key_width=keys.shape[2],
            value_width=width,
            scale=scale,
            **{name: each.data_ptr() for name, each in scalars.items() if each is not None},
            **options,
        )
        self._library.recur(ctypes.addressof(argument), self._segments_of(segments))
        return output

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        self._check(x, B, C)
        times, residual = dt.float(), None if D is None else D.float()
        output = torch.empty(x.shape, dtype=torch.float32)
        argument = _Scan(
            x.data_ptr(),
            times.data_ptr(),
            B.data_ptr(),
            C.data_ptr(),
            x.stride(0),
            times.stride(0),
            B.stride(0),
            C.stride(0),
            A.data_ptr(),
            None if residual is None else residual.data_ptr(),
            state.data_ptr(),
            output.data_ptr(),
            x.shape[1],
            A.shape[1],
        )
        self._library.scan(ctypes.addressof(argument), self._segments_of(segments))
        return output

    def _check(self, *tensors: Tensor | None) -> None:
        """Raises ValueError for a tensor of another dtype than the kernels'."""
        for each in tensors:
            if each is not None and each.dtype is not self._dtype:
                raise ValueError(f"a tensor of {each.dtype} for kernels of {self._dtype}")
