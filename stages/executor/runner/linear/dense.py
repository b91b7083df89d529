"""Torch's linear layers, in bfloat16 or float32."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..kernels.packed import Packed
from ..shards import Box, whole_box
from .method import LinearMethod


class DenseLinear(LinearMethod):
    """An `nn.Linear`, or GPT-2's `Conv1D`, whose weight is `[in, out]`: only torch has that one.

    Attributes:
        transposed: Whether the weight is `[in, out]`.
    """

    def __init__(self, module: nn.Linear | Conv1D) -> None:
        self._module = module
        self.transposed = not isinstance(module, nn.Linear)
        if isinstance(module, nn.Linear):
            self.can_shard = True
            self.inputs, self.outputs = module.in_features, module.out_features
        else:
            self.inputs, self.outputs = module.weight.shape

    @property
    def layer(self) -> nn.Module:
        return self._module

    def pack(self) -> Packed | None:
        return pack_dense(self._module)

    def boxes(self, name: str) -> list[Box]:
        return [whole_box(self._module, name)]


def pack_dense(module: nn.Module) -> Packed | None:
    """Return a module's weights for the kernels; None for another layout."""
    dense = all(parameter.is_contiguous() for parameter in module.parameters())
    if not dense or not isinstance(module, nn.Linear):
        return None
    return Packed(module._parameters, module.in_features, module.out_features)
