"""The whole model with plain tensors, on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import build_glob_alternation

from ....config import ModelError
from .shards import ShardedWeights


def make_whole(hf_config: PreTrainedConfig, dtype: torch.dtype, kind: Any = None) -> Any:
    """Return the whole model on the meta device: it has shapes, and no numbers.

    Args:
        hf_config: Its configuration.
        dtype: Dtype of its weights.
        kind: Its class; that of a causal language model if None.

    Raises:
        ModelError: Transformers can't build it.
    """
    auto: Any = AutoModelForCausalLM
    hf_config = copy.deepcopy(hf_config)  # which gets the attention
    try:
        with torch.device("meta"):
            make = auto.from_config if kind is None else kind._from_config
            whole = make(hf_config, dtype=dtype, attn_implementation="eager")
    except Exception as error:
        raise ModelError(
            f"can't build {hf_config.model_type}: {error}", remedy="choose another model"
        ) from error
    widen(whole, dtype)
    return whole.requires_grad_(False).eval()


def widen(whole: Any, dtype: torch.dtype) -> None:
    """Give weights the dtype that Transformers loads them in, if it is another: routers of some
    mixtures of experts, and their biases, are in float32."""
    plan: dict[str, torch.dtype] = whole._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if (found := pattern.search(name)) is not None and tensor.dtype.is_floating_point:
            tensor.data = tensor.data.to(plan[by_group[found.lastgroup]])


def places_of_codes(module: Any, dtype: torch.dtype) -> ShardedWeights:
    """Return the places of the unquantised model's tensors.

    Args:
        module: A Transformers model with quantised layers.
        dtype: The model's, before its weights became codes.
    """
    return ShardedWeights.of(module, whole=make_whole(module.config, dtype, type(module)))


def add_unquantized(shards: ShardedWeights | None, module: nn.Module) -> None:
    """Have updates of a model with codes replace the weights of a plain one, too.

    Args:
        shards: Those of the model with codes.
        module: The plain model.

    Raises:
        ModelError: The model has no codes.
    """
    if shards is None:
        raise ModelError(
            "engine.reference_model_path unquantized: no layer of the model is quantised; leave it "
            "out, or name fewer layers in engine.quantization_ignore"
        )
    shards.others.append(module)
