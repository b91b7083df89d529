"""Quantised layers of a rank's part of a model, without numbers until a checkpoint's are written.

Their places in the whole model round what is written, at load as in updates. An output's codes
depend on its own weights, and a group's on its own inputs. So ranks that share a layer by outputs,
or by whole groups of inputs, have the codes of the whole layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .....config import EngineConfig, ModelError
from ..kernels.codes import PANEL, Codes
from ..linear.experts import expert_products, put_codes
from ..linear.quantized import QuantizedEmbedding, QuantizedLinear
from ..linear.rounding import Rounding, round_weight
from ..ranks.layers import ParallelExperts, VocabParallelEmbedding
from ..ranks.linear import ColumnParallelLinear, GatheredLinear, RowParallelLinear
from .loading import CodedLayer, coded_module, roundings_of, tied_pair

Tensors = Mapping[str, Tensor]


def put_empty_codes(
    module: Any, whole: Any, config: EngineConfig, absent: Collection[str] = ()
) -> None:
    """Replace the layers of a rank's part that the settings quantise, on the meta device.

    Args:
        module: The rank's part of the model.
        whole: The whole model, on the meta device.
        config: The settings.
        absent: Names of modules that other stages have.

    Raises:
        ModelError: Ranks can't share a layer's groups, or experts with codes; or as `roundings_of`.
    """
    pair = tied_pair(whole)
    shared: dict[str, Tensor] = {}
    # An embedding before the output layer, which may have its tensors.
    roundings = roundings_of(whole, config)
    for name in sorted(roundings, key=lambda each: each in pair[:1]):
        rounding = roundings[name]
        if any(name == each or name.startswith(f"{each}.") for each in absent):
            continue
        owner, _, own = name.rpartition(".")
        products = expert_products(whole.get_submodule(owner))
        if product := next((each for each in products if each.name == own), None):
            if isinstance(module.get_submodule(owner), ParallelExperts):
                raise _cannot_share(config, f"the experts in {owner}", "tensor_parallel to 1")
            form, tensors = _empty(product.outputs, product.inputs, rounding)
            stacked = {
                key: each.new_empty(product.experts, *each.shape) for key, each in tensors.items()
            }
            put_codes(module, name, form, stacked, rounding)
            continue
        plain, dtype = module.get_submodule(name), whole.get_submodule(name).weight.dtype
        tied = shared if name in pair else {}

        def make(outputs: int, inputs: int, rounding: Rounding = rounding) -> QuantizedLinear:
            form, tensors = _empty(outputs, inputs, rounding)
            layer = QuantizedLinear(form, tied or tensors, dtype=dtype)  # noqa: B023
            layer.rounding, layer.activation_bits = rounding, config.activation_bits
            return layer

        if isinstance(plain, RowParallelLinear):
            if not rounding.group or plain.width % rounding.group:
                sizes = [each for each in (128, 64, 32) if plain.width % each == 0]
                change = " or ".join(map(str, sizes))
                raise _cannot_share(
                    config,
                    f"{name}, whose {plain.width} inputs of a part are no whole groups",
                    f"quantization_group to {change}" if sizes else "tensor_parallel to 1",
                )
            plain.quantize(make)
        elif isinstance(plain, ColumnParallelLinear | GatheredLinear):
            plain.quantize(make)
        elif isinstance(plain, VocabParallelEmbedding):
            rows = plain.inner
            made = _embedding(rows, rows.num_embeddings, rounding, dtype)
            shared.update(made._parameters.items())  # type: ignore[arg-type]
            plain.inner = made
        elif isinstance(plain, nn.Embedding):
            made = _embedding(plain, plain.num_embeddings, rounding, dtype)
            module.set_submodule(name, made, strict=True)
        else:
            sizes_of = whole.get_submodule(name)
            form, tensors = _empty(sizes_of.out_features, sizes_of.in_features, rounding)
            layer = coded_module(plain, CodedLayer(form, tensors, rounding=rounding), tensors)
            assert isinstance(layer, QuantizedLinear)
            layer.activation_bits = config.activation_bits
            module.set_submodule(name, layer, strict=True)


def _embedding(
    plain: nn.Embedding, rows: int, rounding: Rounding, dtype: torch.dtype
) -> QuantizedEmbedding:
    form, tensors = _empty(rows, plain.embedding_dim, rounding)
    made = QuantizedEmbedding(form, tensors, plain, dtype)
    made.rounding = rounding
    return made


def _empty(outputs: int, inputs: int, rounding: Rounding) -> tuple[Codes, dict[str, Tensor]]:
    """Return the form of a layer's codes, and its tensors on the meta device."""
    form = rounding.form(outputs, inputs)
    _, panel = round_weight(torch.zeros(PANEL, inputs), rounding)
    return form, {
        name: each.new_empty(form.panels, *each.shape[1:], device="meta")
        for name, each in panel.items()
    }


def _cannot_share(config: EngineConfig, what: str, change: str) -> ModelError:
    return ModelError(
        f"engine.quantization {config.quantization}: ranks can't share {what}; set "
        f"engine.{change}, or engine.quantization to 'auto'"
    )
