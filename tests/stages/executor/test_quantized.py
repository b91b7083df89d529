"""Generation with weights of codes: Transformers' tokens for the unpacked weights, and the same
bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.facts import facts_of_model
from nano_inference.stages.executor.runner.loaded_model import LoadedModel

from ...soaking import in_soak
from .lane import Answer, Lane
from .models import make_model, save
from .references import generate
from .refusals import needs_kernels

PROMPTS = [[(7 * i + 31 * row) % 200 + 1 for i in range(21)] for row in range(3)]
NEW_TOKENS = 10
WIDE = {"hidden_size": 64, "head_dim": 32}
"""Of heads that the kernels take."""


def lane(folder: Path, quantization: str, **settings: Any) -> Lane:
    common: dict[str, Any] = {
        "model_path": str(folder),
        "quantization": quantization,
        "device": "cpu",
        "max_model_len": 128,
        "kv_cache_bytes": 1 << 22,
        "deterministic": True,
    }
    preempt = {"preempt_every": settings.pop("preempt_every", 0), "flush_every": 2}
    config = EngineConfig(**common | settings)
    return Lane(config, ExecutorCore(config), **preempt)


def unpacked(folder: Path, model: LoadedModel) -> Any:
    """Transformers' model with the weights that codes stand for."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtypes.weights)
    for name, each in model.module.named_modules():
        if getattr(each, "holds_codes", False):
            owner: Any = plain.get_submodule(name)
            owner.weight = nn.Parameter(each.get_submodule("").weight, requires_grad=False)
    return plain


def bits(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, each.logprobs) for each in answers]


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    ("name", "quantization", "settings"),
    [
        ("llama", "int8", {}),
        ("llama", "int4", {"quantization_group": 32, "quantization_zero_points": True}),
        ("qwen2", "int4", {}),
        ("gemma3_text", "int8", {"quantization_group": 32}),
        ("qwen3_5_text", "int4", {}),
    ],
)
def test_tokens_are_those_of_the_unpacked_weights(
    name: str, quantization: str, settings: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    if kernels == "auto":
        needs_kernels(torch.float32)
    folder = save(make_model(name, **WIDE), tmp_path)
    served = lane(folder, quantization, kernels=kernels, **settings)
    assert ("kernels" in served.core.off) == (kernels == "off")
    tokens, logits = generate(unpacked(folder, served.core.model), PROMPTS, NEW_TOKENS)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    for answer, wanted, theirs in zip(
        served.run(PROMPTS, NEW_TOKENS), tokens.tolist(), logprobs, strict=True
    ):
        assert answer.token_ids == wanted
        # A recurrent state adds up roundings.
        most = 3e-4 if served.core.model.mixers is not None else 1e-4
        assert (torch.tensor(answer.logprobs) - theirs).abs().max() < most


@pytest.mark.parametrize(
    ("quantization", "kernels"),
    [("int8", "auto"), ("int4", "auto"), in_soak("int8", "off"), in_soak("int4", "off")],
)
def test_bits_depend_on_no_neighbour_chunk_or_preemption(
    quantization: str, kernels: str, tmp_path: Path
) -> None:
    needs_kernels(torch.bfloat16)
    folder = save(make_model("qwen2", **WIDE).bfloat16(), tmp_path)

    def of(**settings: Any) -> Callable[[list[list[int]]], list[Any]]:
        served = lane(folder, quantization, kernels=kernels, **settings)
        return lambda prompts: bits(served.run(prompts, NEW_TOKENS))

    alone = of()
    wanted = [alone([prompt])[0] for prompt in PROMPTS]
    assert of()(PROMPTS) == wanted
    assert of(max_batch_size=4, max_tokens_per_batch=5, preempt_every=3)(PROMPTS) == wanted


def test_deterministic_mode_is_the_default_with_kernels(tmp_path: Path) -> None:
    needs_kernels(torch.bfloat16)
    folder = save(make_model("qwen2", **WIDE).bfloat16(), tmp_path)
    core = lane(folder, "int4", deterministic="auto").core
    assert "deterministic" not in core.off
    assert core.runner.fast_modules is not None
    assert core.runner.fast_modules.is_whole
    facts = facts_of_model(core)
    held = sum(each.nbytes for each in core.model.module.parameters())
    assert facts["weight_bytes"] == held < 0.5 * 2 * int(facts["parameters"])
    assert (facts["quantization"], facts["dtype"]) == ("int4+int8", "bfloat16")


def test_codes_are_not_made_of_a_module_in_memory(tmp_path: Path) -> None:
    """It is shared with its owner, whose changes they would not follow."""
    with pytest.raises(ModelError, match="a module in memory"):
        ExecutorCore(EngineConfig(quantization="int8"), model=wrap_model(make_model("llama"), 64))
