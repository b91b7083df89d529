"""The kernels of `mixers.h` as operators with recurrent state, on CPU tensors.

They are compiled together with those of `cpu.c`, into a library of their own, when a model with
such operators is first loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_long, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..batch import IntArray
from ..fixed_tiles import elementwise
from . import cpu
from .choose import first_usable
from .compile import digest_of

if TYPE_CHECKING:
    from ..state.segments import Segments

_LIBRARIES = {
    dtype: tuple(replace(each, define=f"{each.define} MIXERS") for each in candidates)
    for dtype, candidates in cpu.LIBRARIES.items()
}
_SIGNATURES = {
    "recur": "pp",
    "convolve": "pplpp",
    "scan": "pp",
    "mix": "ppllppp",
    "decoder_layers": "plppp",
}

_MOST_TAPS = 8
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the library for activations of a dtype, with its functions declared.

    Raises:
        KernelsUnavailable: There is none, or none on this machine.
    """
    return first_usable(_LIBRARIES.get(dtype, ()), _SIGNATURES, f"{dtype} on cpu")[1]


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
        self._columns: list[IntArray] = []
        self._run = _Segments()

    def segments_at(self, segments: Segments) -> int:
        """Return the address of a step's segments for the kernels, until the next step."""
        if self._segments is not segments:
            self._segments = segments
            columns = segments.first, segments.count, segments.slot, segments.save
            self._columns = [np.ascontiguousarray(each, np.int64) for each in columns]
            addresses = (each.ctypes.data for each in self._columns)
            self._run = _Segments(*addresses, len(self._columns[0]))
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
            self.segments_at(segments),
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
        return self._recur(
            *(q, k, v, g, state, segments),
            betas=beta.float(),
            scale=scale,
            normalised=l2norm,
            logarithms=True,
            by_channel=g.dim() == 3,
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
        return self._recur(
            *(C, B, x, times * A, state, segments),
            factors=times,
            residual=None if D is None else D.float(),
            logarithms=True,
            wide=True,
        )

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
        self._library.recur(ctypes.addressof(argument), self.segments_at(segments))
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
        self._library.scan(ctypes.addressof(argument), self.segments_at(segments))
        return output

    def _check(self, *tensors: Tensor | None) -> None:
        """Raises ValueError for a tensor of another dtype than the kernels'."""
        for each in tensors:
            if each is not None and each.dtype is not self._dtype:
                raise ValueError(f"a tensor of {each.dtype} for kernels of {self._dtype}")


class _DeltaMixer(ctypes.Structure):
    _fields_ = (
        ("convolution", _Convolution),
        ("recurrence", _Recurrence),
        ("rates", c_void_p),
        ("biases", c_void_p),
        ("norm", c_void_p),
        ("epsilon", c_float),
    )


class DeltaMixer:
    """Gated DeltaNet between its projections: convolution, gates, gated delta rule, gated norm.

    Attributes:
        parameters: Parameters of the modules that it replaces.
        dtype: Dtype of rows and parameters.
        argument: Address of the kernels' argument.
        outputs: Width of an output row.
        scratch: Scratch numbers for each row.
    """

    def __init__(
        self,
        module: nn.Module,
        convolution: nn.Module,
        norm: nn.Module,
        epsilon: float,
        states: Sequence[Tensor],
    ) -> None:
        """Take a mixer's modules and its state; both are used in place.

        Args:
            module: Has the parameters `A_log` and `dt_bias`, `[heads]`.
            convolution: Of queries, keys and values, without bias.
            norm: Of a head's outputs.
            epsilon: Of the norm.
            states: `[slots, width - 1, channels]` and `[slots, heads, key_width, value_width]`.

        Raises:
            ValueError: The parameters have other shapes.
        """
        self.parameters = [each._parameters for each in (module, convolution, norm)]
        windows, state = self._states = states
        _, heads, key_width, value_width = state.shape
        _, kept, channels = windows.shape
        groups, rest = divmod(channels - heads * value_width, 2 * key_width)
        shapes = [(heads,), (heads,), (channels, 1, kept + 1), (value_width,)]
        if rest or heads % groups or [each.shape for each in self._found()] != shapes:
            raise ValueError(f"parameters of other shapes than {shapes}")
        self.dtype = windows.dtype
        self.outputs = heads * value_width
        self._library = library(self.dtype)
        # Two floats for each head, and the convolution's output; the last for alignment.
        self.scratch = 2 * heads * 4 // self.dtype.itemsize + channels + 64
        self._arguments = _DeltaMixer(
            convolution=_Convolution(channels=channels, taps=kept + 1, activated=True),
            recurrence=_Recurrence(
                groups=groups,
                heads=heads,
                key_width=key_width,
                value_width=value_width,
                logarithms=True,
                normalised=True,
                scale=key_width**-0.5,
            ),
            epsilon=epsilon,
        )
        self.argument = ctypes.addressof(self._arguments)
        self.find_weights()
        self.find_states()

    def find_weights(self) -> None:
        """Update the parameters' addresses: a trainer that shares the model may replace them."""
        rates, biases, taps, norm = (each.data_ptr() for each in self._found())
        arguments = self._arguments
        arguments.rates, arguments.biases, arguments.norm = rates, biases, norm
        arguments.convolution.weight = taps

    def find_states(self) -> None:
        """Update the states' addresses after their memory has changed."""
        windows, state = (each.data_ptr() for each in self._states)
        self._arguments.convolution.windows = windows
        self._arguments.recurrence.state = state

    def _found(self) -> list[Tensor]:
        own, convolution, norm = self.parameters
        found = own["A_log"], own["dt_bias"], convolution["weight"], norm["weight"]
        return [each for each in found if each is not None]

    def __call__(self, projected: Tensor, segments: int) -> Tensor:
        """Mix tokens.

        Args:
            projected: `[tokens, width]`, each row contiguous: queries, keys, values, `[channels]`;
                gates, `[heads, value_width]`; learning rates, `[heads]`; time steps, `[heads]`.
            segments: As of `segments_at`.

        Returns:
            `[tokens, heads * value_width]`.
        """
        if projected.dtype is not self.dtype:
            raise ValueError(f"rows of {projected.dtype} for a mixer of {self.dtype}")
        self.find_weights()
        count = len(projected)
        output = torch.empty(count, self.outputs, dtype=self.dtype)
        memory = torch.empty(count * self.scratch, dtype=self.dtype)
        rows = projected.data_ptr(), projected.stride(0), count
        self._library.mix(self.argument, *rows, output.data_ptr(), memory.data_ptr(), segments)
        return output
