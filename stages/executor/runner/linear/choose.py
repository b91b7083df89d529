"""The method of a module."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from .dense import DenseLinear
from .method import LinearMethod


def method_of(module: object) -> LinearMethod | None:
    """Return the method of a linear layer; None for other modules, subclasses of torch's too."""
    if isinstance(module, LinearMethod):
        return module
    return DenseLinear(module) if type(module) in (nn.Linear, Conv1D) else None
