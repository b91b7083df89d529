"""All decoder layers of a model in one call of `cpu.c`, for steps in which each row is one token.

Between calls of single kernels the memory would wait for Python, and a decode step is as fast as it
reads the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.paged import PagedBatch
from ..kernels import cpu
from ..kernels.cpu import Linear, PagedAttention, RMSNorm


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("shifted", c_long))


class _DecoderLayer(ctypes.Structure):
    _fields_ = (
        ("first", _Norm),
        ("second", _Norm),
        ("queries", _Norm),
        ("keys", _Norm),
        ("projection", c_void_p),
        ("output", c_void_p),
        ("gated", c_void_p),
        ("down", c_void_p),
        ("attention", c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_long),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("blocks", c_long),
        ("contexts", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer: x += output(attention(projection(first(x)))), then x += down(gated(second(x))).

    Attributes:
        norms: "first" and "second", and, where heads have norms before they rotate, "queries" and
            "keys".
        linears: "projection" to queries, keys and values side by side, "output" of the attention,
            "gated" for gate and up, "down".
        attention: The layer's cache.
        key_width: Numbers of a head, all of which rotate.
    """

    norms: dict[str, RMSNorm]
    linears: dict[str, Linear]
    attention: PagedAttention
    key_width: int

    @property
    def memory(self) -> int:
        """How many numbers are kept for each row while the layer runs."""
        linears = self.linears
        taken = linears["projection"].inputs + linears["output"].inputs
        return taken + linears["projection"].outputs + linears["gated"].outputs


class DecoderLayers:
    """Decoder layers that follow one another. One thread at a time may call them."""

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        """Takes them in their order; their weights are used where they are.

        Raises:
            ValueError: They rotate different numbers of each head.
        """
        widths = {layer.key_width for layer in layers}
        if len(widths) != 1:
            raise ValueError(f"layers rotate {sorted(widths)} numbers of a head")
        (self._key_width,) = widths
        self._layers = layers
        self._run = cpu.library().decoder_layers
        self._arguments = (_DecoderLayer * len(layers))(
            *(
                _DecoderLayer(
                    attention=layer.attention.argument,
                    **{name: linear.argument for name, linear in layer.linears.items()},
                )
                for layer in layers
            )
        )
        most = max(layer.memory for layer in layers)
        self._memory = torch.empty(cpu.MOST_ROWS * most, dtype=torch.bfloat16)
        # The modules' own dictionaries, which a trainer that shares the model may put others into.
        parts: list[tuple[Linear | RMSNorm, ...]] = [
            (*layer.linears.values(), *layer.norms.values()) for layer in layers
        ]
        self._parameters = [
            module._parameters for layer in parts for part in layer for module in part.modules
        ]
        self._addresses: list[int] = []

    @staticmethod
    def handles(batch: PagedBatch) -> bool:
        """Whether a step's rows are few enough, and of one token each."""
        return batch.decodes.count == batch.slots.shape[0] <= cpu.MOST_ROWS

    def __call__(self, rows: Tensor, cos: Tensor, sin: Tensor, batch: PagedBatch) -> None:
        """Runs a step that it handles, in place.

        Args:
            rows: `[rows, hidden]`, contiguous.
            cos: `[rows, key_width]`, contiguous.
            sin: Likewise.
            batch: The step.

        Raises:
            ValueError: Not all of a head rotates.
        """
        decodes = batch.decodes
        if cos.shape != (rows.shape[0], self._key_width):
            raise ValueError(f"{tuple(cos.shape)} numbers rotate {tuple(rows.shape)} rows")
        self._find_weights()
        step = _Step(
            rows.shape[0],
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slots.data_ptr(),
            decodes.tables.data_ptr(),
            decodes.tables.shape[1],
            decodes.contexts.data_ptr(),
        )
        self._run(
            ctypes.addressof(self._arguments),
            len(self._layers),
            ctypes.addressof(step),
            rows.data_ptr(),
            self._memory.data_ptr(),
        )

    def _find_weights(self) -> None:
        addresses = [
            0 if parameter is None else parameter.data_ptr()
            for parameters in self._parameters
            for parameter in parameters.values()
        ]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for layer, arguments in zip(self._layers, self._arguments, strict=True):
            for linear in layer.linears.values():
                linear.find_weights()
            for name, norm in layer.norms.items():
                weight = norm.weight.data_ptr()
                setattr(arguments, name, _Norm(weight, norm.epsilon, norm.shifted))
