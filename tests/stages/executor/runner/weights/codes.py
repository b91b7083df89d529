"""Models whose linear layers are quantised by hand."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from nano_inference.stages.executor.runner.linear.rounding import Rounding, round_weight
from nano_inference.stages.executor.runner.quantization.loading import CodedLayer, install


def quantized(module: Any, bits: Literal[4, 8] = 4, *, fixed: bool = False) -> Any:
    """Replace the linear layers of a model by quantised ones, and an embedding that is tied.

    Args:
        module: The model.
        bits: Bits of a code; codes of 4 bits have zero points.
        fixed: Whether no rule makes codes of new weights, as of a checkpoint with codes.
    """
    rounding = Rounding(bits, 16, zero_points=bits == 4)
    layers = {
        name: CodedLayer(
            *round_weight(child.weight.data, rounding), rounding=None if fixed else rounding
        )
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    install(module, layers)
    return module
