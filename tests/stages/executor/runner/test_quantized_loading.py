"""Layers of codes in the place of plain ones, while a checkpoint is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import load_model
from nano_inference.stages.executor.runner import model as model_loading
from nano_inference.stages.executor.runner.kernels.codes import Codes, PlainCodes, Scales
from nano_inference.stages.executor.runner.linear.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
)
from nano_inference.stages.executor.runner.linear.rounding import Rounding, round_weight
from nano_inference.stages.executor.runner.loaded_model import LoadedModel
from nano_inference.stages.executor.runner.quantization.loading import LayerCodes, StoredCodes

from ..models import make_model, save
from ..vision_models import make_vision_model


def loaded(folder: Path, quantization: str = "int8", **settings: Any) -> LoadedModel:
    return load_model(
        EngineConfig(
            model_path=str(folder),
            device="cpu",
            quantization=quantization,
            **settings,  # type: ignore[arg-type]
        )
    )


def codes_in(model: nn.Module) -> dict[str, Codes]:
    return {
        name: form for name, each in model.named_modules() if (form := getattr(each, "form", None))
    }


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_logits_are_those_of_the_unpacked_weights(
    name: str, quantization: str, tmp_path: Path
) -> None:
    source = save(make_model(name), tmp_path)
    module = loaded(source, quantization, quantization_group=32).module
    plain = AutoModelForCausalLM.from_pretrained(source)
    held = codes_in(module)
    assert {form.bits for name, form in held.items() if "layers" in name} == {int(quantization[3:])}
    assert held["lm_head"].bits == 8
    for each in held:
        owner = plain.get_submodule(each)
        owner.weight = nn.Parameter(module.get_submodule(each).weight)
    module.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        difference = module(input_ids=ids).logits - plain(input_ids=ids).logits
    assert difference.abs().max() < 1e-5


def test_a_transposed_weight_is_rounded_by_output(tmp_path: Path) -> None:
    """GPT-2's layers."""
    config = GPT2Config(vocab_size=211, n_embd=48, n_layer=1, n_head=4, n_positions=64)
    source = AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path)
    layer = loaded(tmp_path).module.get_submodule("transformer.h.0.mlp.c_fc")
    weight = source.get_submodule("transformer.h.0.mlp.c_fc").weight.T
    assert isinstance(layer, QuantizedLinear)
    assert (layer.weight - weight).norm() < 0.01 * weight.norm()


def test_tied_layers_have_one_set_of_codes(tmp_path: Path) -> None:
    model = loaded(save(make_model("qwen2"), tmp_path))
    output, embedding = model.module.lm_head, model.module.model.embed_tokens
    assert isinstance(output, QuantizedLinear)
    assert isinstance(embedding, QuantizedEmbedding)
    assert output.codes is embedding.codes
    assert model.weight_bytes == sum(each.nbytes for each in model.module.parameters())


@pytest.mark.parametrize("equal", [True, False])
def test_a_checkpoint_with_both_tensors_of_a_tied_pair(equal: bool, tmp_path: Path) -> None:
    file = save(make_model("qwen2"), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding.flip(0)
    save_file(tensors, file, {"format": "pt"})
    module: Any = loaded(tmp_path).module
    assert (module.lm_head.codes is module.model.embed_tokens.codes) == equal
    for name in ("lm_head", "model.embed_tokens"):
        _, wanted = round_weight(tensors[f"{name}.weight"], Rounding(8))
        assert torch.equal(module.get_submodule(name).codes, wanted["codes"])


def test_weights_are_rounded_to_the_dtype_first(tmp_path: Path) -> None:
    source = make_model("llama")
    module = loaded(save(source, tmp_path), dtype="bfloat16").module
    name = "model.layers.1.mlp.up_proj"
    weight = source.get_submodule(name).weight.detach()
    for key, wanted in round_weight(weight.bfloat16(), Rounding(8))[1].items():
        assert torch.equal(module.get_parameter(f"{name}.{key}"), wanted)
    assert module.get_submodule(name).weight.dtype == torch.bfloat16


def test_layers_that_patterns_name_stay_plain(tmp_path: Path) -> None:
    save(make_model("qwen2"), tmp_path)
    held = codes_in(loaded(tmp_path, quantization_ignore=("lm_head", "*.down_proj")).module)
    assert "model.layers.0.mlp.up_proj" in held
    assert "model.layers.0.mlp.down_proj" not in held
    assert {"lm_head", "model.embed_tokens"}.isdisjoint(held)


def test_small_layers_have_8_bits(tmp_path: Path) -> None:
    """All projections of a mixer are one product, so all have codes."""
    save(make_model("qwen3_5_text", linear_num_value_heads=2, linear_num_key_heads=2), tmp_path)
    held = codes_in(loaded(tmp_path, "int4").module)
    mixer = next(name for name in held if "in_proj_qkv" in name).removesuffix("in_proj_qkv")
    assert held[f"{mixer}in_proj_qkv"].bits == 4
    assert held[f"{mixer}in_proj_b"].bits == held[f"{mixer}in_proj_a"].bits == 8


def test_routers_stay_plain(tmp_path: Path) -> None:
    held = codes_in(loaded(save(make_model("qwen3_moe"), tmp_path)).module)
    assert "model.layers.0.self_attn.q_proj" in held
    assert not any(name.endswith(".gate") for name in held)


def test_only_the_text_part_of_a_model_for_images_is_quantised(tmp_path: Path) -> None:
    make_vision_model("qwen2_vl").save_pretrained(tmp_path)
    held = codes_in(loaded(tmp_path).module)
    assert "model.language_model.layers.0.mlp.up_proj" in held
    assert all(name.startswith("model.language_model.") or name == "lm_head" for name in held)


def test_pattern_without_a_module_is_refused(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    with pytest.raises(
        ModelError, match=r"'\*.down_projs' matches no module.*model.layers.0.mlp.down_proj"
    ):
        loaded(tmp_path, quantization_ignore=("*.down_projs",))


def test_weight_that_is_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    source = make_model("llama")
    source.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    save(source, tmp_path)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.*infinite or not numbers"):
        loaded(tmp_path)


def test_checkpoint_of_codes_is_not_rounded_again(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised already \(gptq\)"):
        loaded(tmp_path)


class Halves(StoredCodes):
    """A format that keeps "halves", in steps of 0.5 around 8, beside plain tensors."""

    stored = ("weight", "halves")
    label = "halves"

    def handles(self, name: str) -> bool:
        return name.endswith("up_proj")

    def read(
        self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> LayerCodes | Tensor:
        if "weight" in stored:
            return stored["weight"]
        form = Codes(*shape, bits=4, group=8, zero=8)
        scales = Scales(torch.full((shape[0], form.groups), 0.5))
        order = torch.arange(shape[1]).flip(0)
        return LayerCodes(form, PlainCodes(stored["halves"], scales), order)


def test_layers_of_a_format_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tensors keep their place, and one layer of the kind may be plain."""
    source = make_model("llama")
    file = save(source, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    codes = torch.randint(0, 16, source.model.layers[1].mlp.up_proj.weight.shape)
    tensors["model.layers.1.mlp.up_proj.halves"] = codes.to(torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setattr(model_loading, "_plan_of", lambda *_: Halves())
    module: Any = loaded(tmp_path).module
    assert [*codes_in(module)] == ["model.layers.1.mlp.up_proj.inner"]
    assert torch.equal(module.model.layers[1].mlp.up_proj.weight, (codes.flip(1) - 8) / 2)
    for name, tensor in tensors.items():
        if "halves" not in name:
            assert torch.equal(module.get_parameter(name), tensor), name
    x = torch.randn(3, 48)
    layer = module.model.layers[1].mlp.up_proj
    assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-4)


def test_format_of_another_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(make_model("llama"), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj."
    tensors[f"{name}halves"] = torch.zeros(4, 4, dtype=torch.uint8)
    del tensors[f"{name}weight"]
    save_file(tensors, file, {"format": "pt"})

    class Other(Halves):
        def read(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Any:
            return stored.get("weight", super().read(name, stored, (4, 4)))

    monkeypatch.setattr(model_loading, "_plan_of", lambda *_: Other())
    with pytest.raises(
        ModelError, match=r"up_proj has codes \[4, 4\], and config.json makes it \[64, 48\]"
    ):
        loaded(tmp_path)
