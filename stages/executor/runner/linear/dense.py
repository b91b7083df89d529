"""Torch's linear layers, in bfloat16 or float32."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..shards import Box, whole_box
from .method import LinearMethod, Packed


class DenseLinear(LinearMethod):
    """An `nn.Linear`."""

    can_shard = True

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self.inputs, self.outputs = module.in_features, module.out_features

    @property
    def layer(self) -> nn.Module:
        return self._module

    def pack(self) -> Packed | None:
        return pack_dense(self._module)

    def boxes(self, name: str) -> list[Box]:
        return [whole_box(self._module, name)]


class TransposedLinear(LinearMethod):
    """GPT-2's `Conv1D`, whose weight is `[in, out]`."""

    def __init__(self, module: Conv1D) -> None:
        self._module: Any = module
        self.inputs, self.outputs = module.weight.shape

    @property
    def layer(self) -> nn.Module:
        module: nn.Module = self._module
        return module

    def boxes(self, name: str) -> list[Box]:
        return [whole_box(self._module, name)]


def pack_dense(module: nn.Linear) -> Packed | None:
    """Return a module's weights for the kernels; None if they are not contiguous."""
    if not all(parameter.is_contiguous() for parameter in module.parameters()):
        return None
    return Packed(module._parameters, module.in_features, module.out_features)
