"""Loading, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, load_model, wrap_model

from ..models import REFUSED, VOCAB, make_config, make_model, make_refused
from ..plans import Generation, Planner


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def load(folder: object, **settings: Any) -> Any:
    return load_model(EngineConfig(model_path=str(folder), **{"device": "cpu", **settings}))


def test_a_model_from_a_folder_gives_what_it_gives_in_memory(tmp_path: Path) -> None:
    source = make_model("qwen3")
    config = EngineConfig(
        model_path=save(source, tmp_path), block_size=4, max_model_len=64, device="cpu"
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    generations = [Generation(1, [5, 6, 7], sampling) for _ in range(2)]
    Planner(ExecutorCore(config)).run(generations[:1])
    Planner(ExecutorCore(config, model=wrap_model(source, 64))).run(generations[1:])
    assert generations[0].token_ids == generations[1].token_ids
    assert generations[0].logprobs == generations[1].logprobs


def test_what_is_known_of_a_loaded_model(tmp_path: Path) -> None:
    folder = save(make_model("gemma2"), tmp_path)
    model = load(folder, max_model_len=8192)
    assert (model.max_model_len, model.vocab_size) == (256, VOCAB)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert [layer.window for layer in model.layers] == [8, None, 8]
    assert {(s.num_kv_heads, s.key_dim, s.value_dim) for s in model.layers} == {(2, 16, 16)}
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert load(folder, max_model_len=100).max_model_len == 100


def test_bfloat16_runs(tmp_path: Path) -> None:
    folder = save(make_model("llama").bfloat16(), tmp_path)
    config = EngineConfig(model_path=folder, block_size=4, max_model_len=64, device="cpu")
    generation = Generation(1, [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=4))
    Planner(ExecutorCore(config), chunk=2).run([generation])
    assert len(generation.token_ids) == 4


def test_contexts_that_would_change_the_rotary_factors_of_others_are_cut() -> None:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    model = make_model("phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    assert wrap_model(model, 200).max_model_len == 64


# --- refusals ---------------------------------------------------------------------------------


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="can't read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="can't read"):
        load(tmp_path)
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="can't load"):
        load(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load(folder)


@pytest.mark.parametrize(("kind", "why"), REFUSED.items(), ids=list(REFUSED))
def test_kinds_of_models_that_are_refused_by_name(tmp_path: Path, kind: str, why: str) -> None:
    config, model = make_refused(kind)
    # Of most kinds the class is enough to know: they are refused before any weight is looked for.
    (config if model is None else model).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=re.escape(why)) as refused:
        load(tmp_path)
    name = kind if model is None else type(model).__name__
    assert name.replace("_", "").lower() in str(refused.value).lower()


def test_hybrid_models_are_refused() -> None:
    config = CONFIG_MAPPING["qwen3_next"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=0,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"state-space"):
        wrap_model(model, 64)


def test_masks_that_our_attention_does_not_make_are_refused() -> None:
    """A window in the mask of which the layer does not tell the attention function."""
    model = make_model("qwen2_window")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="mask of layer 0 is neither"):
        wrap_model(model, 64)


@pytest.mark.parametrize("device", ["tpu9", "meta", "cuda:77"])
def test_devices_that_are_not_there(tmp_path: Path, device: str) -> None:
    with pytest.raises(ModelError, match=r"device '.*; here (is|are) .*cpu; use one, or 'auto'"):
        load(tmp_path, device=device)
