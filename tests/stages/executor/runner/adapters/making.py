"""Random adapters made by PEFT, and the outputs of Transformers with them merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    model: Any, seed: int, folder: Path | None = None, scale: float = 1.0, **settings: Any
) -> Any:
    """A PEFT model on a copy of the model, with random matrices; saved if there is a folder.

    `scale`: of its second matrices; at 1 an adapter changes nearly every greedy choice.
    """
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **settings})
    adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                width = parameter.shape[-1] ** -0.5
                drawn = torch.randn(parameter.shape, generator=generator) * width
                parameter.copy_(drawn * (scale if "lora_B" in name else 1.0))
    if folder is not None:
        adapted.save_pretrained(str(folder))
    return adapted


def merged(adapted: Any) -> Any:
    """The model with the adapter in its weights."""
    return copy.deepcopy(adapted).merge_and_unload()
