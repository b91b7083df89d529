"""Adapters that can't be served are refused with a code, before anything has changed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.config import AdapterError
from nano_inference.stages.executor import LoadedModel, wrap_model
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter
from nano_inference.stages.executor.runner.adapters.table import AdapterTable

from ...encoders import make_base
from ...models import load, make_model, save
from ...refusals import refused
from .making import make_adapter

LIMITS = AdapterLimits(adapters=2, rank=8)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap_model(make_model("llama"), 64)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapter") / "good"
    make_adapter(make_model("llama"), 0, made)
    return made


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refusal(folder: Path, model: LoadedModel) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read_adapter("a", 1, str(folder), model, LIMITS)
    return refused.value


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"peft_type": "LOHA"}, "adapter_unsupported"),
        ({"use_dora": True}, "adapter_unsupported"),
        ({"bias": "all"}, "adapter_unsupported"),
        ({"modules_to_save": ["lm_head"]}, "adapter_unsupported"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "adapter_unsupported"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter_unsupported"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "adapter_unsupported"),
        ({"r": 5}, "adapter_refused"),
        ({"r": "four"}, "adapter_refused"),
        ({"lora_alpha": None}, "adapter_refused"),
    ],
)
def test_configurations(
    folder: Path, model: LoadedModel, settings: dict[str, Any], code: str
) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert refusal(folder, model).code == code


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
HEAD = "base_model.model.lm_head"


@pytest.mark.parametrize(
    ("removed", "added", "code"),
    [
        ("", {A: torch.zeros(4, 49)}, "adapter_refused"),
        (
            Q,
            {"x.lora_A.weight": torch.zeros(4, 48), "x.lora_B.weight": torch.zeros(64, 4)},
            "adapter_refused",
        ),
        (B, {}, "adapter_refused"),
        ("base_model", {}, "adapter_refused"),
        ("", {B: torch.full((64, 4), math.nan)}, "adapter_not_finite"),
        ("", {A: torch.zeros(9, 48), B: torch.zeros(64, 9)}, "adapter_too_large"),
        (
            "",
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 211)},
            "adapter_unsupported",
        ),
        (
            "",
            {
                f"{HEAD}.lora_A.weight": torch.zeros(4, 48),
                f"{HEAD}.lora_B.weight": torch.zeros(211, 4),
            },
            "adapter_unsupported",
        ),
    ],
    ids=["wide", "renamed", "half", "none", "nan", "ranked", "of embeddings", "of the output"],
)
def test_tensors(
    folder: Path, model: LoadedModel, removed: str, added: dict[str, torch.Tensor], code: str
) -> None:
    path = folder / "adapter_model.safetensors"
    kept = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not (removed and name.startswith(removed))
    }
    save_file({**kept, **added}, path)
    assert refusal(folder, model).code == code


def test_files(folder: Path, model: LoadedModel, tmp_path: Path) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = weights.read_bytes()
    for spoiled in (content[: len(content) // 2], b"", b"\xff" * 64):
        weights.write_bytes(spoiled)
        assert refusal(folder, model).code == "adapter_refused"
    with weights.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    assert refusal(folder, model).code == "adapter_too_large"
    weights.unlink()
    assert "No such file" in refusal(folder, model).message
    for text in ("{", "[]", " " * (2 << 20)):
        config.write_text(text)
        assert refusal(folder, model).code in ("adapter_refused", "adapter_too_large")
    config.unlink()
    assert "save_pretrained" in refusal(folder, model).message
    assert refusal(tmp_path / "nowhere", model).code == "adapter_refused"


def test_experts(tmp_path: Path) -> None:
    """In a Mixture of Experts the router and the experts are no linear layers."""
    loaded = wrap_model(make_model("mixtral"), 64)
    make_adapter(make_model("mixtral"), 0, tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for half, shape in (("A", (4, 48)), ("B", (64, 4))):
        name = f"base_model.model.model.layers.0.mlp.experts.lora_{half}.weight"
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path)
    assert refusal(tmp_path, loaded).code == "adapter_unsupported"


def test_choose_lengths(saved: Path, model: LoadedModel) -> None:
    table = AdapterTable(model, LIMITS)
    good = read_adapter("a", 1, str(saved), model, LIMITS)
    for id in ("a", "b", "a"):
        version = 2 if table.get(id) else 1
        table.put(read_adapter(id, version, str(saved), model, LIMITS))
    with refused("adapter_limit"):
        table.put(read_adapter("c", 1, str(saved), model, LIMITS))
    assert [(each.id, each.version) for each in table] == [("a", 2), ("b", 1)]
    table.switch("b", 0)
    table.put(read_adapter("c", 1, str(saved), model, LIMITS))
    assert {each.id for each in table} == {"a", "c"}
    assert sum(each.num_bytes for each in table) == 2 * good.num_bytes


def test_the_model_is_as_it_was(saved: Path, model: LoadedModel) -> None:
    """Outside of a step with an adapter the modules are unchanged."""
    before = {module: dict(vars(module)) for module in model.module.modules()}
    table = AdapterTable(model, LIMITS)
    table.put(read_adapter("a", 1, str(saved), model, LIMITS))
    with pytest.raises(RuntimeError), table.applied(table.step(np.array([0, -1]))):
        assert any("forward" in vars(module) for module in before)
        raise RuntimeError
    assert {module: dict(vars(module)) for module in model.module.modules()} == before


def test_an_encoder_has_no_adapters(tmp_path: Path) -> None:
    """Its layers would ignore the adapter."""
    base = make_base("bert")
    make_adapter(base, 0, tmp_path / "adapter", target_modules=["query", "value"])
    encoder = load(save(base, tmp_path / "bert"))
    refused = refusal(tmp_path / "adapter", encoder)
    assert refused.code == "adapter_unsupported"
    assert "encoder" in refused.message
