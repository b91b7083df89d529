"""Quantised layers of a pipeline stage: without numbers, until a checkpoint's are written.

Their places in the whole model round what is written, at load as in updates, so that each rank has
the codes of a model on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ....config import EngineConfig, ModelError
from .linear.choose import method_of
from .linear.codes import PANEL, Codes
from .linear.experts import expert_products, put_codes
from .linear.quantized import QuantizedLinear
from .linear.rounding import Rounding, round_weight
from .quantized_loading import CodedLayer, coded_module, roundings_of


def check_shared(config: EngineConfig) -> None:
    """Check that ranks can hold codes: each has layers as a whole.

    Raises:
        ModelError: They share layers.
    """
    if config.tensor_parallel > 1 or config.rank_invariant:
        raise ModelError(
            f"engine.quantization {config.quantization}: ranks that share a layer would have "
            "scales of its parts; set engine.tensor_parallel to 1, engine.rank_invariant to false "
            "(engine.pipeline_parallel takes quantised layers), or engine.quantization to 'auto'"
        )


def put_empty_codes(
    module: Any, whole: Any, config: EngineConfig, absent: Collection[str] = ()
) -> None:
    """Replace the layers of a stage that the settings quantise, on the meta device.

    Args:
        module: The stage's part of the model.
        whole: The whole model, on the meta device.
        config: The settings.
        absent: Names of modules that other stages have.

    Raises:
        ModelError: As `check_shared`, or as `roundings_of`.
    """
    check_shared(config)
    for name, rounding in roundings_of(whole, config).items():
        if any(name == each or name.startswith(f"{each}.") for each in absent):
            continue
        owner, _, own = name.rpartition(".")
        products = expert_products(module.get_submodule(owner))
        product = next((each for each in products if each.name == own), None)
        if product is not None:
            form, tensors = _empty(product.outputs, product.inputs, rounding)
            stacked = {
                key: each.new_empty(product.experts, *each.shape) for key, each in tensors.items()
            }
            put_codes(module, name, form, stacked, rounding)
            continue
        plain: nn.Module = module.get_submodule(name)
        if (method := method_of(plain)) is not None:
            form, tensors = _empty(method.outputs, method.inputs, rounding)
        else:
            form, tensors = _empty(*whole.get_submodule(name).weight.shape, rounding)
        made = coded_module(plain, CodedLayer(form, tensors, rounding=rounding), tensors)
        if isinstance(made, QuantizedLinear):
            made.activation_bits = config.activation_bits
        module.set_submodule(name, made, strict=True)


def _empty(outputs: int, inputs: int, rounding: Rounding) -> tuple[Codes, dict[str, Tensor]]:
    """Return the form of a layer's codes, and its tensors on the meta device."""
    _, panel = round_weight(torch.zeros(PANEL, inputs), rounding)
    panels = math.ceil(outputs / PANEL)
    tensors = {
        name: each.new_empty(panels, *each.shape[1:], device="meta") for name, each in panel.items()
    }
    return rounding.form(outputs, inputs), tensors
