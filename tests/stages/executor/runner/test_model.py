"""Wrapped models, their properties, devices, and the refused models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    DbrxConfig,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.facts import facts_of_model
from nano_inference.stages.executor.runner import device as devices
from nano_inference.stages.executor.runner.batch import Uploader
from nano_inference.stages.executor.runner.loaded_model import experts_of

from ..models import REFUSED, VOCAB, load, make_config, make_model, make_refused, save
from ..plans import Generation, Planner


def test_a_model_from_a_folder_equals_the_one_in_memory(tmp_path: Path) -> None:
    source = make_model("qwen3")
    config = EngineConfig(
        model_path=str(save(source, tmp_path)), block_size=4, max_model_len=64, device="cpu"
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    generations = [Generation(1, [5, 6, 7], sampling) for _ in range(2)]
    Planner(ExecutorCore(config)).run(generations[:1])
    Planner(ExecutorCore(config, model=wrap_model(source, 64))).run(generations[1:])
    assert generations[0].token_ids == generations[1].token_ids
    assert generations[0].logprobs == generations[1].logprobs


def test_properties_of_a_loaded_model(tmp_path: Path) -> None:
    folder = save(make_model("gemma2"), tmp_path)
    model = load(folder, max_model_len=8192)
    assert (model.max_model_len, model.vocab_size) == (256, VOCAB)
    assert (model.dtypes.kv_cache, model.device) == (torch.float32, torch.device("cpu"))
    assert [layer.window for layer in model.layers] == [8, None, 8]
    assert {(s.num_kv_heads, s.key_dim, s.value_dim) for s in model.layers} == {(2, 16, 16)}
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert load(folder, max_model_len=100).max_model_len == 100


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


@pytest.mark.parametrize(("kind", "why"), REFUSED.items(), ids=list(REFUSED))
def test_kinds_of_models_that_are_refused_by_name(tmp_path: Path, kind: str, why: str) -> None:
    config, model = make_refused(kind)
    # Of most kinds the class is enough to know: they are refused before any weight is looked for.
    (config if model is None else model).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=re.escape(why)) as refused:
        load(tmp_path)
    name = kind if model is None else type(model).__name__
    assert name.replace("_", "").lower() in str(refused.value).lower()


def test_unsupported_masks_are_refused() -> None:
    """A window in the mask of which the layer does not tell the attention function."""
    model = make_model("qwen2_window")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="mask of layer 0 is neither"):
        wrap_model(model, 64)


def test_unknown_keywords_of_attention_are_refused() -> None:
    """By which other implementations compute something else, such as sparse attention."""
    model = make_model("llama")

    def add(*given: Any) -> Any:
        return given[1], given[2] | {"block_indices": torch.zeros(1)}

    model.model.layers[1].self_attn.register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ModelError, match="layer 1 computes attention by `block_indices`"):
        wrap_model(model, 64)


def test_layers_that_change_their_mask_are_refused() -> None:
    model = make_model("llama")

    def cut(*given: Any) -> Any:
        return given[1], given[2] | {"attention_mask": given[2]["attention_mask"][:, :, :1]}

    model.model.layers[1].self_attn.register_forward_pre_hook(cut, with_kwargs=True)
    with pytest.raises(ModelError, match="its layers compute with their masks"):
        wrap_model(model, 64)


def test_indexers_of_an_unknown_kind_are_refused() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.indexer = torch.nn.Linear(4, 4)
    with pytest.raises(ModelError, match="an indexer of a kind that is not known"):
        wrap_model(model, 64)


@pytest.mark.parametrize("device", ["tpu9", "meta", "cuda:77"])
def test_devices_that_are_not_there(tmp_path: Path, device: str) -> None:
    with pytest.raises(ModelError, match=r"device '.*; here (is|are) .*cpu; use one, or 'auto'"):
        load(tmp_path, device=device)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (Qwen3Config(), (0, 0)),
        (MixtralConfig(num_local_experts=6, num_experts_per_tok=3), (6, 3)),
        (Qwen3MoeConfig(num_experts=32, num_experts_per_tok=4), (32, 4)),
        (DeepseekV3Config(n_routed_experts=64, num_experts_per_tok=5), (64, 5)),
        (DbrxConfig(ffn_config={"moe_num_experts": 7, "moe_top_k": 2}), (7, 2)),
        (AutoConfig.for_model("hunyuan_v1_moe", num_experts=4, moe_topk=[1, 2]), (4, 2)),
        (AutoConfig.for_model("hunyuan_v1_moe", num_experts=1, moe_topk=1), (0, 0)),
        (AutoConfig.for_model("gemma4_text", enable_moe_block=False), (0, 0)),
    ],
)
def test_experts_by_whatever_name(config: PreTrainedConfig, experts: tuple[int, int]) -> None:
    assert experts_of(config) == experts


def test_facts_of_a_model() -> None:
    core = ExecutorCore(EngineConfig(dtype="float32", kv_cache_bytes=1 << 24, max_batch_size=4))
    facts = facts_of_model(core)
    assert facts["dtype"] == "float32"
    assert facts["vocab_size"] == core.model.vocab_size
    assert facts["weight_bytes"] == 4 * int(facts["parameters"]) > 0
    assert facts["kv_bytes"] == sum(each.nbytes for each in core.cache.keys + core.cache.values)
    core.close()


class Driver:
    """Torch's module of a kind of device, such as `torch.cuda`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, device: torch.device) -> str:
        return f"Maker {device.type.upper()}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 7, 9


Machine = Any


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these numbers of devices by kind, for calls that do not compute."""

    def made(**counts: int) -> None:
        def module(kind: str) -> Driver:
            return Driver(counts.get(kind, 0))

        monkeypatch.setattr(torch, "get_device_module", module)

    return made


ALL = {"cuda": 2, "xpu": 1, "mps": 1}


@pytest.mark.parametrize(
    ("name", "counts", "expected"),
    [
        *(("cpu", ALL, "cpu"), ("cuda", ALL, "cuda:0"), ("cuda:1", ALL, "cuda:1")),
        *(("xpu", ALL, "xpu:0"), ("mps", ALL, "mps"), ("mps:0", ALL, "mps")),
        *(("auto", ALL, "cuda:0"), ("auto", {"mps": 1, "xpu": 2}, "xpu:0")),
        *(("auto", {"mps": 1}, "mps"), ("auto", {}, "cpu")),
    ],
)
def test_a_device_is_named_as_by_torch_and_auto_is_the_first_that_is_there(
    machine: Machine, name: str, counts: dict[str, int], expected: str
) -> None:
    machine(**counts)
    assert str(devices.resolve_device(name)) == expected


@pytest.mark.parametrize("name", ["cuda:2", "xpu", "mps:0", "meta", "cpu:1", "gpu", "cuda:x"])
def test_missing_devices_are_refused_with_a_list_of_present_ones(
    machine: Machine, name: str
) -> None:
    machine(cuda=2)
    with pytest.raises(ModelError, match=rf"'{name}'.*; here are cuda:0, cuda:1, cpu; use one"):
        devices.resolve_device(name)


def test_replicas_take_one_device_after_the_other(machine: Machine) -> None:
    machine(cuda=2, xpu=1)
    names = [devices.device_of_replica("auto", replica) for replica in range(3)]
    assert names == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices.device_of_replica("xpu", 1) == "xpu"
    assert devices.device_of_replica("cuda:0", 1) == "cuda:0"


def test_devices_on_which_no_test_ran_are_marked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=1, xpu=1, mps=1)
    names = ("cpu", "cuda:0", "xpu:0")
    described = [devices.describe_device(torch.device(name)) for name in names]
    assert described == ["cpu", "cuda:0 Maker CUDA", "xpu:0 Maker XPU (unverified)"]
    assert devices.describe_device(torch.device("mps")) == "mps (unverified)"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    amd = devices.describe_device(torch.device("cuda:0"))
    assert amd == "cuda:0 Maker CUDA, ROCm 7.1 (unverified)"


def test_memory_is_that_of_the_device_where_it_has_its_own(machine: Machine) -> None:
    machine(cuda=1, xpu=1, mps=1)
    found = {name: devices.free_memory(torch.device(name)) for name in ("cpu", "mps", "xpu:0")}
    assert found == {"cpu": None, "mps": None, "xpu:0": (7, 9)}


def test_uploads_to_devices_other_than_cuda() -> None:
    ids, table = Uploader(torch.device("meta"))(np.arange(3), np.zeros((2, 4), np.int64))
    assert (ids.device.type, tuple(ids.shape)) == ("meta", (3,))
    assert (table.device.type, tuple(table.shape)) == ("meta", (2, 4))
