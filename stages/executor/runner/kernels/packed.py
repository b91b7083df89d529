"""Weights of linear layers as the CPU kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from .codes import Codes


class Packed(NamedTuple):
    """A layer's weights as the CPU kernels read them, in place.

    Attributes:
        parameters: "weight", `[outputs, inputs]`, or the tensors of codes; and "bias", `[outputs]`
            or None. The live dictionary of a module: a trainer that shares the model may put new
            tensors there.
        inputs: Input features.
        outputs: Output features.
        codes: The form of codes; None of a "weight".
        activations: With codes, the dtype of rows, outputs and bias.
        activation_bits: With codes, 16 for products that are finer than the rows' dtype, or 8.
    """

    parameters: dict[str, nn.Parameter | None]
    inputs: int
    outputs: int
    codes: Codes | None = None
    activations: torch.dtype | None = None
    activation_bits: Literal[16, 8] = 16

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows, and of a weight."""
        if self.activations is not None:
            return self.activations
        weight = self.parameters["weight"]
        assert weight is not None
        return weight.dtype


class PackedSum(NamedTuple):
    """A sum of products over consecutive input features.

    Attributes:
        parts: One, or four without biases.
        bias: The parameters with the "bias" of the sum; None for that of the only part.
    """

    parts: Sequence[Packed]
    bias: dict[str, nn.Parameter | None] | None = None
