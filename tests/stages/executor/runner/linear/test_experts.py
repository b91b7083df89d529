"""Routed experts as codes: the sums of Transformers' experts with unpacked weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nano_inference.stages.executor import wrap_model
from nano_inference.stages.executor.runner.fixed_tiles import FixedTiles
from nano_inference.stages.executor.runner.linear.codes import (
    Codes,
    PlainCodes,
    Scales,
    unpack_plain,
)
from nano_inference.stages.executor.runner.linear.experts import (
    QuantizedExperts,
    expert_products,
    is_other_mixture,
    stack_codes,
)

from ...models import VOCAB, make_model
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


def quantize(model: Any, bits: Any, group: int) -> tuple[dict[str, QuantizedExperts], Any]:
    """Replace a model's experts by codes, and those of a copy by the codes' weights."""
    whole = copy.deepcopy(model)
    found = {}
    for path, module in experts_in(model).items():
        experts = QuantizedExperts(module)
        for name, count, outputs, inputs, transposed in experts.products:
            form = Codes(outputs, inputs, bits, group, zero=1 << (bits - 1))
            weights = experts.get_parameter(name)
            rows = (weights.mT if transposed else weights).float()
            plain = [rounded(form, each) for each in rows]
            unpacked = torch.stack([unpack_plain(form, each) for each in plain])
            with torch.no_grad():
                whole.get_submodule(path).get_parameter(name).copy_(
                    unpacked.mT if transposed else unpacked
                )
            experts.put(name, form, stack_codes(form, plain))
            assert torch.equal(experts.weight(name, count - 1), unpacked[-1])
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, experts)
        found[path] = experts
    return found, whole


def rounded(form: Codes, weight: Tensor) -> PlainCodes:
    width = form.groups * form.group
    padded = nn.functional.pad(weight, (0, width - form.inputs)).unflatten(1, (-1, form.group))
    scales = padded.abs().amax(-1) / (form.zero - 1)
    codes = (padded / scales[..., None]).round() + form.zero
    return PlainCodes(codes.flatten(1)[:, : form.inputs].to(torch.uint8), Scales(scales))


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
