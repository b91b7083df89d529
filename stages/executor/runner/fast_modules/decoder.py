"""All decoder layers of a model in one call of `cpu.c`, for steps in which each row is one token.

A decode step is bound by reading the weights, and between calls of single kernels the memory would
be idle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_float, c_long, c_void_p
from functools import partial
from itertools import chain
from operator import is_not
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from ..attention.paged import PagedBatch
from ..kernels import cpu
from ..kernels.cpu import Linear, LinearSum, PagedAttention, RMSNorm

if TYPE_CHECKING:
    from ..kernels.mixers import DeltaMixer
    from ..mixers.find import Mixers

_KEPT_ROWS = 64
"""Rows whose scratch memory is kept between steps; larger steps allocate theirs."""


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("shifted", c_long))


class _DecoderLayer(ctypes.Structure):
    _fields_ = (
        ("first", _Norm),
        ("second", _Norm),
        ("queries", _Norm),
        ("keys", _Norm),
        ("projection", c_void_p),
        ("gated", c_void_p),
        ("output", c_void_p),
        ("down", c_void_p),
        ("attention", c_void_p),
        ("gated_heads", c_long),
        ("mixer", c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_long),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("blocks", c_long),
        ("contexts", c_void_p),
        ("num_read", c_long),
        ("read", c_void_p),
        ("read_tables", c_void_p),
        ("read_contexts", c_void_p),
        ("rotated", c_long),
        ("segments", c_void_p),
    )


# A layer may have no bias, which torch writes as None.
_IS_THERE = partial(is_not, None)


class LayerParts(msgspec.Struct, frozen=True):
    """One layer: x += output(attention(projection(first(x)))), then x += down(gated(second(x))).

    Attributes:
        norms: "first" and "second", and, where heads have norms before they rotate, "queries" and
            "keys".
        linears: "projection" to queries, keys and values side by side, "gated" for gate and up.
        sums: "output" of the attention, "down" of the MLP.
        attention: The layer's cache; None of a layer with a mixer.
        key_width: Width of a head.
        gated_heads: Whether "projection" has a gate beside each query, for the attention's output.
        mixer: In place of the attention.
    """

    norms: dict[str, RMSNorm]
    linears: dict[str, Linear]
    sums: dict[str, LinearSum]
    attention: PagedAttention | None = None
    key_width: int = 0
    gated_heads: bool = False
    mixer: DeltaMixer | None = None

    @property
    def memory(self) -> int:
        """Scratch numbers for each row."""
        projection, gated = self.linears["projection"], self.linears["gated"]
        taken = projection.inputs + self.sums["output"].inputs
        scratch = max(each.scratch for each in self.sums.values())
        if self.mixer is not None:
            scratch = max(scratch, self.mixer.scratch)
        return taken + projection.outputs + gated.outputs + scratch

    @property
    def products(self) -> dict[str, Linear | LinearSum]:
        """All linear layers."""
        return {**self.linears, **self.sums}


class DecoderLayers:
    """Consecutive decoder layers, for one thread at a time.

    Attributes:
        whole_width: Width of a head, if all of it rotates; 0 if a part does.
        taps: Functions that take a copy of the rows, by the number of layers before.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts],
        rotated: int,
        *,
        watches: bool,
        mixers: Mixers | None = None,
    ) -> None:
        """Take the layers in order; their weights are used in place.

        Args:
            layers: The layers.
            rotated: Numbers of a head that rotate.
            mixers: Have the segments of a step; None if no layer has a mixer.
            watches: Whether weights may move between two calls without `find_weights`. The check
                takes a hundredth of a decode step, since the tensors have left the CPU's caches.

        Raises:
            ValueError: The layers differ in width of heads or dtype.
        """
        widths = {layer.key_width for layer in layers if layer.key_width}
        dtypes = {linear.dtype for layer in layers for linear in layer.products.values()}
        if len(widths) > 1 or len(dtypes) != 1:
            raise ValueError(f"layers of {dtypes} have heads of {sorted(widths)} numbers")
        self.whole_width = rotated if widths == {rotated} else 0
        self._rotated, (self._dtype,) = rotated, dtypes
        self.taps: dict[int, Callable[[Tensor], None]] = {}
        self._layers, self._watches = layers, watches
        self._mixers = mixers if any(layer.mixer for layer in layers) else None
        library = cpu.library
        if self._mixers is not None:
            from ..kernels.mixers import library
        self._run = library(self._dtype).decoder_layers
        self._arguments = (_DecoderLayer * len(layers))(
            *(
                _DecoderLayer(
                    attention=None if layer.attention is None else layer.attention.argument,
                    gated_heads=layer.gated_heads,
                    mixer=None if layer.mixer is None else layer.mixer.argument,
                    **{name: linear.argument for name, linear in layer.products.items()},
                )
                for layer in layers
            )
        )
        self._address, self._count = addressof(self._arguments), len(layers)
        self._width = max(layer.memory for layer in layers)
        self._kept = torch.empty(_KEPT_ROWS * self._width, dtype=self._dtype)
        # The modules' own dictionaries, where a trainer that shares the model may put new tensors.
        parts: list[tuple[Linear | LinearSum | RMSNorm | DeltaMixer, ...]] = [
            (*layer.products.values(), *layer.norms.values(), *filter(None, (layer.mixer,)))
            for layer in layers
        ]
        self._parameters = [each for layer in parts for part in layer for each in part.parameters]
        self._addresses: list[int] = []
        self.find_weights()

    @staticmethod
    def handles(batch: PagedBatch) -> bool:
        """Return whether each row of a step is one token."""
        return batch.decodes.count == batch.slots.shape[0]

    def __call__(
        self,
        rows: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: PagedBatch,
        positions: Tensor | None = None,
    ) -> None:
        """Run a step that it handles, in place.

        Args:
            rows: `[rows, hidden]`, contiguous. Rows outside `batch.read` are invalid afterwards.
            cos: `[positions, rotated]`, contiguous; without positions `[rows, rotated]`.
            sin: Likewise.
            batch: The step.
            positions: `[rows]`, contiguous: each row's place in `cos` and `sin`.

        Raises:
            ValueError: Other numbers rotate, or rows or factors are of another dtype.
        """
        if not self._dtype is rows.dtype is cos.dtype is sin.dtype:
            raise ValueError(f"{rows.dtype}, {cos.dtype} and {sin.dtype} for {self._dtype}")
        decodes, count = batch.decodes, rows.shape[0]
        if cos.shape != (count if positions is None else len(cos), self._rotated):
            raise ValueError(f"{tuple(cos.shape)} numbers rotate {tuple(rows.shape)} rows")
        if self._watches:
            self.find_weights()
        memory = self._kept
        if count > _KEPT_ROWS:
            memory = torch.empty(count * self._width, dtype=self._dtype)
        step = _Step(
            count,
            cos.data_ptr(),
            sin.data_ptr(),
            None if positions is None else positions.data_ptr(),
            batch.slots.data_ptr(),
            decodes.tables.data_ptr(),
            decodes.tables.shape[1],
            decodes.contexts.data_ptr(),
            count,
            rotated=self._rotated,
        )
        if self._mixers is not None:
            step.segments = self._mixers.operators.segments_at(self._mixers.segments)  # type: ignore
        if (read := batch.read) is not None:
            step.num_read, step.read = read.rows.count, read.index.data_ptr()
            step.read_tables = read.rows.tables.data_ptr()
            step.read_contexts = read.rows.contexts.data_ptr()
        if self.taps:
            self._run_tapped(rows, step, memory)
            return
        self._run(
            self._address,
            self._count,
            addressof(step),
            rows.data_ptr(),
            memory.data_ptr(),
        )

    def _run_tapped(self, rows: Tensor, step: _Step, memory: Tensor) -> None:
        """Run the layers in parts, between which `taps` get the rows."""
        first, num_read, last = 0, step.num_read, self._count
        for stop in sorted({*self.taps, last}):
            # Only the last layer may leave rows out.
            step.num_read = num_read if stop == last else step.rows
            self._run(
                self._address + first * ctypes.sizeof(_DecoderLayer),
                stop - first,
                addressof(step),
                rows.data_ptr(),
                memory.data_ptr(),
            )
            if (tap := self.taps.get(stop)) is not None:
                tap(rows.clone())
            first = stop

    def find_weights(self) -> None:
        """Update the weights' addresses after their memory has changed."""
        # Without Python code per parameter, since it may run in each step.
        parameters: Iterator[Any] = chain.from_iterable(map(dict.values, self._parameters))
        addresses = list(map(Tensor.data_ptr, filter(_IS_THERE, parameters)))
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for layer, arguments in zip(self._layers, self._arguments, strict=True):
            for linear in layer.products.values():
                linear.find_weights()
            if layer.mixer is not None:
                layer.mixer.find_weights()
            for name, norm in layer.norms.items():
                weight = norm.weight.data_ptr()
                setattr(arguments, name, _Norm(weight, norm.epsilon, norm.shifted))
