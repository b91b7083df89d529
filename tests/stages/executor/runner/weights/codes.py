"""Models whose linear layers are quantised by a rule of the tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.stages.executor.runner.linear.codes import (
    Codes,
    PlainCodes,
    Scales,
    pack_plain,
)
from nano_inference.stages.executor.runner.linear.quantized import QuantizedLinear


def round_weight(bits: Any, group: int, weight: Tensor) -> PlainCodes:
    """Codes with zero points in 4 bits, and without them in 8."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - inputs))
    by_group = padded.view(outputs, groups, group)
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if bits == 8:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-8)
    codes = ((by_group - low[..., None]) / scales[..., None]).round()
    codes = codes.view(outputs, -1)[:, :inputs].to(torch.uint8)
    return PlainCodes(codes, Scales(scales), Scales(-low))


def quantized(module: Any, bits: Any = 4, group: int = 16, *, fixed: bool = False) -> Any:
    """Replace the linear layers of a model, but for the output layer, by quantised ones.

    Args:
        module: The model.
        bits: Bits of a code.
        group: Inputs that share a scale.
        fixed: Whether no rule makes codes of new weights, as of a checkpoint with codes.
    """
    for name, child in list(module.named_modules()):
        if not isinstance(child, nn.Linear) or name == "lm_head":
            continue
        form = Codes(child.out_features, child.in_features, bits, group)
        rounding = partial(round_weight, bits, group)
        tensors = pack_plain(form, rounding(child.weight.data))
        layer = QuantizedLinear(form, tensors, child.bias, dtype=child.weight.dtype)
        layer.rounding = None if fixed else rounding
        module.set_submodule(name, layer)
    return module
