"""Which modules of a model take the kernels, and that a caller beside the executor never does."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.kernels import cpu
from nano_inference.stages.executor.kernels.compile import KernelsUnavailable
from nano_inference.stages.executor.model import wrap_model

from ..lane import Lane
from ..models import ARCHITECTURES, make_model

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], list(range(20, 90)))
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        cpu.library()
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")


def bfloat16(name: str, **changes: Any) -> Any:
    return make_model(name, **changes).to(torch.bfloat16)


def core_of(model: Any, **changes: Any) -> ExecutorCore:
    return ExecutorCore(EngineConfig(max_model_len=256, **changes), model=wrap_model(model, 256))


EVERY = {"DecoderLayer", "Attention", "MLP", "RMSNorm"}

TAKEN = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), EVERY),
    **dict.fromkeys(("gemma2", "gemma3_text"), EVERY - {"DecoderLayer"}),
    "phi3": {"RMSNorm"},
    "olmo2": {"MLP", "RMSNorm"},
}
"""The ends of the names of classes, besides linear layers."""


@pytest.mark.parametrize("name", TAKEN)
def test_the_patterns_find_what_they_are_for(name: str) -> None:
    core = core_of(bfloat16(name, head_dim=32))
    assert core.without_kernels == ""
    assert core.fast_modules is not None
    assert core.fast_modules.count["Linear"]
    found = {part for part in EVERY if any(each.endswith(part) for each in core.fast_modules.count)}
    assert found == TAKEN[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fast_passes_are_as_near_to_float32_as_plain_ones(name: str) -> None:
    """With heads of 32, so that every pattern may apply; see test_parity for the bound."""
    model = bfloat16(name, head_dim=32)
    exact = make_model(name, head_dim=32).to(torch.bfloat16).float()
    distances = []
    choices: tuple[Literal["auto", "off"], ...] = ("auto", "off")
    for kernels in choices:
        answers = Lane(wrap_model(model, 256), kernels=kernels).run(PROMPTS, NEW_TOKENS)
        found, wanted = [], []
        for answer in answers:
            ids = torch.tensor([[*answer.prompt, *answer.token_ids]])
            with torch.inference_mode():
                logits = exact(ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
            chosen = torch.tensor(answer.token_ids)[:, None]
            wanted.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
            found.append(torch.tensor(answer.logprobs))
        distances.append(float((torch.cat(found) - torch.cat(wanted)).abs().mean()))
    assert 0 < distances[0] <= 1.5 * distances[1]


def test_a_module_that_computes_something_else_stays_as_it_is() -> None:
    model = bfloat16("llama", head_dim=32)
    norm = model.model.layers[1].post_attention_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * 1.1
    core = core_of(model)
    assert core.fast_modules.count["LlamaDecoderLayer"] == 2
    assert core.fast_modules.count["LlamaRMSNorm"] == 6
    assert core.fast_modules.refused.keys() == {"LlamaDecoderLayer", "LlamaRMSNorm"}


def test_whoever_else_calls_the_model_runs_transformers_own_code() -> None:
    model = bfloat16("qwen2", head_dim=32)
    reference = bfloat16("qwen2", head_dim=32)
    core = core_of(model)
    assert core.fast_modules.count
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(ids).logits, reference(ids).logits)
    model.train()
    model(ids).logits.float().sum().backward()
    assert model.model.layers[0].mlp.gate_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("dtype", "changes", "why"),
    [
        (torch.float32, {}, "there are none for torch.float32"),
        (torch.bfloat16, {"kernels": "off"}, "engine.kernels is off"),
        (torch.bfloat16, {"deterministic": True}, "deterministic mode"),
    ],
)
def test_a_model_without_kernels_says_why(
    dtype: torch.dtype, changes: dict[str, Any], why: str
) -> None:
    core = core_of(make_model("llama").to(dtype), **changes)
    assert why in core.without_kernels
    assert core.fast_modules is None
