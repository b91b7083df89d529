"""Routed experts as codes: the sums of Transformers' experts with unpacked weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nano_inference.config import ModelError
from nano_inference.stages.executor import wrap_model
from nano_inference.stages.executor.runner.fast_modules.calls import Calls
from nano_inference.stages.executor.runner.fast_modules.experts import expert_pass
from nano_inference.stages.executor.runner.fixed_tiles import FixedTiles
from nano_inference.stages.executor.runner.linear.experts import (
    QuantizedExperts,
    expert_products,
    is_other_mixture,
    put_codes,
    round_experts,
)
from nano_inference.stages.executor.runner.linear.rounding import Rounding
from nano_inference.stages.executor.runner.weights.sync_manager import WeightSyncManager

from ...models import VOCAB, load, make_model, save
from ...refusals import needs_kernels
from ..test_deterministic import assert_arrangements_agree

ARCHITECTURES = {
    "mixtral": "gates beside each other",
    "qwen3_moe": "experts narrower than the layer",
    "gpt_oss": "transposed weights, biases, alternating gates that are clamped",
    "deepseek_v3": "a shared expert",
    "nemotron_h": "no gate",
}


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules() if expert_products(each)}


def experts_of(model: nn.Module) -> dict[str, QuantizedExperts]:
    found = model.named_modules()
    return {name: each for name, each in found if isinstance(each, QuantizedExperts)}


def quantize(model: Any, bits: Any, group: int) -> tuple[dict[str, QuantizedExperts], Any]:
    """Replace a model's experts by codes, and those of a copy by the codes' weights."""
    whole = copy.deepcopy(model)
    for path, module in experts_in(model).items():
        for product in expert_products(module):
            name, transposed = f"{path}.{product.name}", product.transposed
            weights = module.get_parameter(product.name)
            rounding = Rounding(bits, group)
            made = round_experts(weights, rounding, transposed=transposed)
            put_codes(model, name, *made, rounding)
            experts = model.get_submodule(path)
            unpacked = [experts.weight(product.name, each) for each in range(product.experts)]
            with torch.no_grad():
                rows = torch.stack(unpacked)
                whole.get_parameter(name).copy_(rows.mT if transposed else rows)
    return experts_of(model), whole


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sums_are_those_of_unpacked_weights(name: str) -> None:
    model = make_model(name)
    found, whole = quantize(model, 4, 16)
    assert found
    ids = torch.randint(1, VOCAB, (1, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits, wanted = (each(ids, use_cache=False).logits for each in (model, whole))
    assert (logits - wanted).norm() <= 1e-5 * wanted.norm()


def test_other_mixtures_are_named() -> None:
    with torch.device("meta"):
        others = [each for each in make_model("llama4_text").modules() if is_other_mixture(each)]
    assert {type(each).__name__ for each in others} == {"Llama4TextExperts"}
    assert not any(map(is_other_mixture, make_model("gpt_oss").modules()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_token_has_the_same_bits_alone_and_in_a_crowd(name: str, dtype: torch.dtype) -> None:
    found, _ = quantize(make_model(name).to(dtype), 8, 32)
    experts = next(iter(found.values()))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(29, experts.products[0].inputs, generator=generator).to(dtype)
    weights, chosen = torch.rand(29, 4, generator=generator).topk(2)
    with FixedTiles(), torch.inference_mode():
        crowd = experts(hidden, chosen, weights.to(dtype))
        for token in range(0, 29, 4):
            one = slice(token, token + 1)
            alone = experts(hidden[one], chosen[one], weights[one].to(dtype))
            assert torch.equal(alone, crowd[one])


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_arrangements_agree_to_the_bit(name: str) -> None:
    model = make_model(name).to(torch.bfloat16)
    quantize(model, 8, 32)
    assert_arrangements_agree(wrap_model(model, 128))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_is_read_to_codes_of_its_experts(name: str, tmp_path: Path) -> None:
    model = make_model(name).to(torch.bfloat16)
    save(model, tmp_path)
    loaded = load(tmp_path, quantization="int4", quantization_group=32).module
    found, _ = quantize(model, 4, 32)
    for path, experts in found.items():
        for product in experts.products:
            own = loaded.get_submodule(f"{path}.{product.name}")
            wanted = experts.get_submodule(product.name)
            assert own.form == wanted.form
            assert all(map(torch.equal, own.parameters(), wanted.parameters()))
    kept = load(tmp_path, quantization="int4", quantization_ignore=("*.experts.*", "lm_head"))
    assert experts_in(kept.module).keys() == found.keys()


def test_experts_of_another_kind_are_refused_unless_ignored(tmp_path: Path) -> None:
    save(make_model("llama4_text").to(torch.bfloat16), tmp_path)
    with pytest.raises(ModelError, match=r"Llama4TextExperts.*'\*\.experts\*' to engine"):
        load(tmp_path, quantization="int8")
    assert load(tmp_path, quantization="int8", quantization_ignore=("*.experts*",))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kernels_compute_the_same_sums_in_any_batch(name: str, bits: int) -> None:
    needs_kernels(torch.bfloat16)
    wide = {"moe_intermediate_size": 128, "intermediate_size": 128}
    found, _ = quantize(make_model(name, **wide).to(torch.bfloat16), bits, 32)
    experts = next(iter(found.values()))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(21, experts.products[0].inputs, generator=generator).bfloat16()
    weights, chosen = torch.rand(21, 4, generator=generator).topk(2)
    with torch.inference_mode(), (tiles := FixedTiles()):
        fast = expert_pass(experts, torch.bfloat16, Calls(tiles))
        assert fast is not None
        crowd, wanted = (each(rows, chosen, weights.bfloat16()) for each in (fast, experts))
        assert (crowd - wanted).norm() < 0.01 * wanted.norm()
        for token in range(0, 21, 3):
            one = slice(token, token + 1)
            alone = fast(rows[one], chosen[one], weights[one].bfloat16())
            assert torch.equal(alone, crowd[one])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_new_weights_are_rounded_like_those_of_a_checkpoint(name: str) -> None:
    models = [make_model(name, seed=seed).to(torch.bfloat16) for seed in (0, 1)]
    new = {key: each.float() for key, each in models[1].state_dict().items()}
    for model in models:
        quantize(model, 4, 32)
    updated = wrap_model(models[0], 64)
    assert WeightSyncManager(updated.module, shards=updated.shards).sync_blocking(new) == 1
    own, wanted = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, own[key]) for key, tensor in wanted.items())
    assert updated.shards is not None
    read = updated.shards.read()
    for path, experts in experts_of(models[1]).items():
        for product in experts.products:
            rows = read[f"{path}.{product.name}"]
            first = experts.weight(product.name, 0).bfloat16()
            assert torch.equal(rows[0].t() if product.transposed else rows[0], first)
