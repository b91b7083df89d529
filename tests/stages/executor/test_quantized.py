"""Generation with weights of codes: Transformers' tokens for the unpacked weights, and the same
bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, load_model
from nano_inference.stages.executor.runner.loaded_model import LoadedModel

from .lane import Answer, Lane
from .models import make_model, save
from .refusals import needs_kernels
from .references import generate

PROMPTS = [[(7 * i + 3 * row) % 200 + 1 for i in range(21)] for row in range(3)]
NEW_TOKENS = 12


def config_of(folder: Path, quantization: str, **settings: Any) -> EngineConfig:
    common: dict[str, Any] = {
        "model_path": str(folder),
        "quantization": quantization,
        "device": "cpu",
        "max_model_len": 128,
        "block_size": 8,
    }
    return EngineConfig(**common | settings)


def unpacked(folder: Path, model: LoadedModel) -> Any:
    """Transformers' model with the weights that codes stand for."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtypes.weights)
    for name, each in model.module.named_modules():
        if hasattr(each, "form"):
            owner: Any = plain.get_submodule(name)
            owner.weight = nn.Parameter(each.weight, requires_grad=False)
    return plain


def answers(config: EngineConfig, prompts: list[list[int]], **settings: Any) -> list[Answer]:
    lane = Lane(config, ExecutorCore(config), **settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return lane.run(prompts, sampling)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_tokens_are_those_of_the_unpacked_weights(
    name: str, quantization: str, kernels: str, tmp_path: Path
) -> None:
    config = config_of(save(make_model(name), tmp_path), quantization, kernels=kernels)
    core = ExecutorCore(config)
    assert core.off.get("deterministic") is None
    found = Lane(config, core)
    print(
        core.off,
        core.runner.fast_modules
        and (
            core.runner.fast_modules.count,
            core.runner.fast_modules.refused,
            core.runner.fast_modules.is_whole,
        ),
    )
