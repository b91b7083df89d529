"""Linear layers whose weights are codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..shards import Box, whole_box
from .codes import Codes, unpack
from .method import LinearMethod
from .requantizing import CodesBox, Rounding


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is codes, `scale * (value - zero) - offset`.

    Its own pass unpacks the weight to the activations' dtype: it is the reference for kernels, and
    what runs without them.

    Attributes:
        form: The form of the codes.
        dtype: Dtype of activations and bias.
        bias: `[outputs]`, or None.
        rounding: Makes codes of new weights; None if the codes were read from a checkpoint.
        holds_codes: Marks modules whose tensors are not those of the whole model.
    """

    holds_codes: ClassVar[bool] = True
    bias: nn.Parameter | None
    rounding: Rounding | None = None

    def __init__(
        self,
        form: Codes,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Take the weights.

        Args:
            form: The form of the codes.
            tensors: As `pack_plain` returns them. They become parameters of these names.
            bias: `[outputs]`, or None.
            dtype: Dtype of activations.
        """
        super().__init__()
        self.form, self.dtype = form, dtype
        self.in_features, self.out_features = form.inputs, form.outputs
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        own = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", own)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The packed weight, by the names of `pack_plain`."""
        return {name: each.data for name, each in self.named_parameters() if name != "bias"}

    def unpacked(self) -> Tensor:
        """Return the weight, `[outputs, inputs]`, in the activations' dtype."""
        return unpack(self.form, self.tensors).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        return F.linear(x, self.unpacked(), self.bias)

    def boxes(self, name: str) -> list[Box]:
        """Return the parts of the layer's "weight" or "bias", for `shards.boxes_in`."""
        if name != "weight":
            return [whole_box(self, name)]
        tensors = self.tensors
        place = (slice(0, self.out_features), slice(0, self.in_features))
        return [CodesBox(tensors["codes"], place, self.form, tensors, self.dtype, self.rounding)]


class QuantizedMethod(LinearMethod):
    """The method of a `QuantizedLinear`."""

    def __init__(self, module: QuantizedLinear) -> None:
        self._module = module
        self.inputs, self.outputs = module.in_features, module.out_features

    @property
    def layer(self) -> nn.Module:
        return self._module

    def boxes(self, name: str) -> list[Box]:
        return self._module.boxes(name)
