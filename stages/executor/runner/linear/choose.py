"""The method of a module."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from .dense import DenseLinear, TransposedLinear
from .method import LinearMethod


def method_of(module: object) -> LinearMethod | None:
    """Return the method of a linear layer; None for other modules, subclasses of torch's too."""
    if isinstance(module, LinearMethod):
        return module
    if type(module) is nn.Linear:
        return DenseLinear(module)
    if type(module) is Conv1D:
        return TransposedLinear(module)
    return None
