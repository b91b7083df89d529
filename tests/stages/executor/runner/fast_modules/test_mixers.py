"""Layers with recurrent state in the one call of all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from nano_inference.config import EngineConfig
from nano_inference.stages.executor.runner.comparison import _sequences, _stepwise
from nano_inference.stages.executor.runner.fast_modules.decoder import DecoderLayers
from nano_inference.stages.executor.runner.interface import ModelRunner, make_runner
from nano_inference.stages.executor.runner.model import wrap_model

from ...refusals import needs_kernels

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    needs_kernels(*DTYPES)
    found: torch.dtype = request.param
    return found


def hybrid(dtype: torch.dtype, **changes: Any) -> Any:
    """A Gated DeltaNet with more values than keys, and an attention whose heads rotate in part."""
    settings = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
    }
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**settings | changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def runner_of(model: Any) -> ModelRunner:
    count = len(_sequences())
    config = EngineConfig(max_model_len=64, max_batch_size=count, block_size=4)
    return make_runner(config, wrap_model(model, 64), count * 16)


def logits_of(runner: ModelRunner, *, alone: bool = False) -> list[Tensor]:
    """Logits of sequences in steps that cut them in several ways."""
    assert runner.determinism is not None
    assert runner.fast_modules is not None
    with runner.determinism.tiles, runner.fast_modules.active(alone=alone):
        return _stepwise(runner.model, runner.cache, runner.builder, runner.fast_modules)


def test_a_hybrid_model_is_computed_as_a_whole_and_is_deterministic(dtype: torch.dtype) -> None:
    runner = runner_of(hybrid(dtype))
    assert runner.fast_modules is not None
    assert runner.fast_modules.is_whole
    assert runner.fast_modules.count["Qwen3_5DecoderLayer"] == 3
    assert not runner.off


def test_layers_in_one_call_give_the_bits_of_single_passes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(hybrid(dtype))
    in_one_call = logits_of(runner)
    monkeypatch.setattr(DecoderLayers, "handles", staticmethod(lambda batch: False))
    for alone in (False, True):
        for found, wanted in zip(logits_of(runner, alone=alone), in_one_call, strict=True):
            assert torch.equal(found, wanted)


def test_new_parameters_of_a_mixer_are_used(dtype: torch.dtype) -> None:
    model, other = hybrid(dtype), hybrid(dtype)
    runner = runner_of(model)
    before = logits_of(runner)
    generator = torch.Generator().manual_seed(1)
    for layer, same in zip(model.model.layers, other.model.layers, strict=True):
        if not hasattr(layer, "linear_attn"):
            continue
        for name, old in list(layer.linear_attn.named_parameters()):
            new = (old.float() * (1 + torch.rand(old.shape, generator=generator))).to(dtype)
            for mixer in (layer.linear_attn, same.linear_attn):
                owner, _, attribute = name.rpartition(".")
                holder = mixer.get_submodule(owner)
                setattr(holder, attribute, torch.nn.Parameter(new.clone(), False))
    for found, wanted, old in zip(
        logits_of(runner), logits_of(runner_of(other)), before, strict=True
    ):
        assert torch.equal(found, wanted)
        assert not torch.equal(found, old)


def test_a_mixer_that_does_more_than_its_parts_stays_unchanged(dtype: torch.dtype) -> None:
    model = hybrid(dtype)
    norm = model.model.layers[0].linear_attn.norm
    plain = norm.forward
    norm.forward = lambda *args: plain(*args) * 1.5
    runner = runner_of(model)
    assert runner.fast_modules is not None
    assert runner.fast_modules.count["Qwen3_5DecoderLayer"] == 2
    assert runner.fast_modules.refused["Qwen3_5DecoderLayer"] == "it computes something else"
