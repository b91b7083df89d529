"""Quantised checkpoints: loaded models compute as Transformers' with the unpacked weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.runner.linear.experts import ExpertCodes, QuantizedExperts
from nano_inference.stages.executor.runner.linear.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    ReorderedLinear,
)

from ..models import load, make_model, save
from ..plans import Generation, Planner
from .linear.formats.packers import Integers, awq, gptq, pack_rows
from .linear.formats.test_floats import E2M1, NUMBERS

FILE = "model.safetensors"
Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""From a layer's name and weight to its stored tensors and its weight as they say it."""


def rounded(weight: Tensor, bits: int, group: int, *, ordered: bool = True) -> Integers:
    """Round a weight to integers with zero points."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // (inputs if group == -1 else group)
    if not ordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    members = [weight[:, groups == each] for each in range(int(groups.max()) + 1)]
    low = torch.stack([each.amin(1) for each in members], 1).clamp(max=0)
    high = torch.stack([each.amax(1) for each in members], 1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).half()
    zeros = (-low / scales).round().clamp(0, (1 << bits) - 1)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, (1 << bits) - 1)
    return Integers(codes.int(), zeros.int(), scales, groups, bits)


def write(
    model: Any,
    folder: Path,
    config: Mapping[str, Any],
    pack: Pack,
    excluded: str = "lm_head",
    more: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save a model whose linear layers are quantised, and give it their weights.

    Args:
        model: A model of Transformers.
        folder: Its new folder.
        config: The quantization_config.
        pack: The format.
        excluded: A pattern of the names of layers that stay plain.
        more: Stored tensors of other layers, whose weights are left out.
    """
    stored = {name: each.contiguous() for name, each in (more or {}).items()}
    tied = getattr(model, "all_tied_weights_keys", {})  # they are stored once
    for name, module in model.named_modules():
        if f"{name}.weight" in tied:
            continue
        if isinstance(module, nn.Linear) and not re.search(excluded, name):
            tensors, weight = pack(name, module.weight.data.float())
            module.weight.data = weight.to(module.weight.dtype)
            stored |= {f"{name}.{own}": each.contiguous() for own, each in tensors.items()}
    save(model, folder)
    owners = {
        re.sub(r"(_blocks|_scales|\.\w+(?<!_blocks)(?<!_scales))$", "", name) for name in stored
    }
    kept = load_file(folder / FILE)
    kept = {name: each for name, each in kept.items() if name.removesuffix(".weight") not in owners}
    save_file(kept | stored, folder / FILE, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return folder


def assert_computes_as(folder: Path, model: Any, **settings: Any) -> Any:
    """Check a folder's tokens and logprobs against a model of Transformers; return its model.

    They have the same bits alone and in a batch.
    """
    common: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 1 << 20, "device": "cpu"}
    core = ExecutorCore(
        EngineConfig(model_path=str(folder), deterministic=True, **common | settings)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 20, [8, 7]]
    generation, *others = [Generation(seq, ids, sampling) for seq, ids in enumerate(prompts, 1)]
    planner = Planner(core)
    planner.run([generation])
    planner.run(others)
    assert others[0].logprobs == generation.logprobs
    ids = torch.tensor([[5, 6, 7, *generation.token_ids]])
    logprobs = model.eval()(ids[:, :-1]).logits[0, 2:].float().log_softmax(-1)
    assert generation.token_ids == logprobs.argmax(-1).tolist()
    assert generation.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=2e-4)
    return core.model


def pack_gptq(layer: Integers) -> tuple[dict[str, Tensor], Tensor]:
    return gptq(layer, subtract=True), layer.weight


def pack_awq(layer: Integers) -> tuple[dict[str, Tensor], Tensor]:
    return awq(layer), layer.weight


def pack_compressed(layer: Integers) -> tuple[dict[str, Tensor], Tensor]:
    return {
        "weight_packed": pack_rows(layer.codes, 4),
        "weight_scale": layer.scales,
        "weight_zero_point": pack_rows(layer.zero_points.T, 4).T,
        "weight_shape": torch.tensor(layer.codes.shape),
    }, layer.weight


def pack_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = nn.functional.pad(weight, (0, -weight.shape[1] % 32, 0, -weight.shape[0] % 16))
    peaks = blocks.unflatten(0, (-1, 16)).unflatten(2, (-1, 32)).abs().amax((1, 3))
    scales = (peaks / 448).clamp(min=1e-6)
    spread = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


SCHEME = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False, "group_size": 16}}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": SCHEME},
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, lambda _, weight: pack_gptq(rounded(weight, 4, 16))),
    "act-order": (
        GPTQ | {"desc_act": True},
        lambda _, weight: pack_gptq(rounded(weight, 4, 16, ordered=False)),
    ),
    "gptq of 3 bits": (GPTQ | {"bits": 3}, lambda _, weight: pack_gptq(rounded(weight, 3, 16))),
    "mixed gptq": (
        GPTQ | {"dynamic": {r"+:.*\.1\..*": {"bits": 8, "group_size": -1}}},
        lambda name, weight: pack_gptq(rounded(weight, *((8, -1) if ".1." in name else (4, 16)))),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16},
        lambda _, weight: pack_awq(rounded(weight, 4, 16)),
    ),
    "compressed-tensors": (COMPRESSED, lambda _, weight: pack_compressed(rounded(weight, 4, 16))),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        lambda _, weight: pack_fp8(weight),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_computes_as_its_unpacked_weights(name: str, tmp_path: Path) -> None:
    config, pack = FORMATS[name]
    model = make_model("qwen2", tie_word_embeddings=False, num_hidden_layers=2)
    loaded = assert_computes_as(write(model, tmp_path, config, pack), model)
    kind = ReorderedLinear if name == "act-order" else QuantizedLinear
    layers = [each for each in loaded.module.modules() if isinstance(each, kind)]
    assert len(layers) == 2 * 7
    assert type(loaded.module.lm_head) is nn.Linear
    assert loaded.checkpoint_format


def pack_experts(
    model: Any, quantize: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
) -> dict[str, Tensor]:
    """Quantise a mixture's experts, each stored by itself, and give the model their weights."""
    stored: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for expert, (both, down) in enumerate(
            zip(module.gate_up_proj, module.down_proj, strict=True)
        ):
            gate, up = both.data.chunk(2)
            for own, part in (("gate_proj", gate), ("up_proj", up), ("down_proj", down.data)):
                tensors, weight = quantize(part)
                part.copy_(weight)
                stored |= {f"{name}.{expert}.{own}.{key}": each for key, each in tensors.items()}
    return {name: each.contiguous() for name, each in stored.items()}


@pytest.mark.parametrize("name", ["awq", "fp8"])
@torch.no_grad()
def test_experts_that_transformers_stacks_are_kept_as_codes(name: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", hidden_size=64, num_hidden_layers=2)
    config, pack = FORMATS[name]
    experts = pack_experts(model, lambda weight: pack("", weight.float()))
    write(model, tmp_path, config, pack, excluded="mlp|lm_head", more=experts)
    loaded = assert_computes_as(tmp_path, model)
    layers = [each for each in loaded.module.modules() if isinstance(each, QuantizedExperts)]
    assert len(layers) == 2
    assert all(isinstance(each.down_proj, ExpertCodes) for each in layers)
    assert {name for name, _ in loaded.module.named_parameters() if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{product}.{tensor}"
        for layer in range(2)
        for product in ("gate_up_proj", "down_proj")
        for tensor in (("codes", "scales", "offsets") if name == "awq" else ("codes", "scales"))
    }


@torch.no_grad()
def test_the_experts_of_gpt_oss_are_kept_as_codes(tmp_path: Path) -> None:
    model = make_model("gpt_oss", hidden_size=64)
    stored: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for own in ("gate_up_proj", "down_proj") if name.endswith(".experts") else ():
            weight = module.get_parameter(own)  # [experts, inputs, outputs]
            experts, inputs, outputs = weight.shape
            codes = torch.randint(0, 16, (experts, outputs, inputs), generator=NUMBERS)
            scales = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=NUMBERS)
            values = torch.where(codes < 8, 1, -1) * E2M1[codes % 8]
            weight.copy_((values * (scales - 127.0).exp2().repeat_interleave(32, 2)).mT)
            pairs = codes[..., 0::2] | codes[..., 1::2] << 4
            stored[f"{name}.{own}_blocks"] = pairs.to(torch.uint8).unflatten(2, (-1, 16))
            stored[f"{name}.{own}_scales"] = scales.to(torch.uint8)
    write(model, tmp_path, {"quant_method": "mxfp4"}, FORMATS["awq"][1], excluded="", more=stored)
    loaded = assert_computes_as(tmp_path, model)
    assert sum(isinstance(each, ExpertCodes) for each in loaded.module.modules()) == 6
    assert loaded.checkpoint_format == "MXFP4"


def test_codes_of_embedding_and_output_layer_are_read(tmp_path: Path) -> None:
    model = make_model("qwen2", tie_word_embeddings=False, num_hidden_layers=2)
    config = {"quant_method": "gptq", "bits": 8, "group_size": 16, "lm_head": True}
    pack: Pack = lambda _, weight: pack_gptq(rounded(weight, 8, 16))  # noqa: E731
    tensors, weight = pack("", model.model.embed_tokens.weight.data)
    model.model.embed_tokens.weight.data = weight
    embedding = {f"model.embed_tokens.{name}": each for name, each in tensors.items()}
    write(model, tmp_path, config, pack, excluded="^$", more=embedding)
    loaded = assert_computes_as(tmp_path, model)
    assert isinstance(loaded.module.model.embed_tokens, QuantizedEmbedding)
    assert isinstance(loaded.module.lm_head, QuantizedLinear)


def test_tied_layers_of_a_quantised_checkpoint_stay_plain(tmp_path: Path) -> None:
    model = make_model("qwen2")
    loaded = assert_computes_as(write(model, tmp_path, *FORMATS["gptq"]), model)
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight


def test_blocks_that_layers_share_have_one_set_of_codes(tmp_path: Path) -> None:
    model = make_model("zamba", tie_word_embeddings=True)
    loaded = assert_computes_as(write(model, tmp_path, *FORMATS["gptq"]), model)
    first, second = (
        dict(loaded.module.model.layers[layer].shared_transf.named_parameters()) for layer in (2, 4)
    )
    assert first.keys() == second.keys()
    assert all(first[name] is second[name] for name in first)


def test_float16_becomes_bfloat16_and_is_said(tmp_path: Path) -> None:
    model = make_model("qwen2", tie_word_embeddings=False, num_hidden_layers=2).half()
    loaded = load(write(model, tmp_path, *FORMATS["gptq"]))
    assert loaded.dtypes.activations is torch.bfloat16
    assert any("float16" in note for note in loaded.checkpoint_notes)


def test_the_configuration_of_older_checkpoints_is_found(tmp_path: Path) -> None:
    model = make_model("qwen2", tie_word_embeddings=False, num_hidden_layers=2)
    folder = write(model, tmp_path, *FORMATS["gptq"])
    path = folder / "config.json"
    content = json.loads(path.read_text())
    own = {
        name: each for name, each in content.pop("quantization_config").items() if each != "gptq"
    }
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="no quantization_config that says how"):
        load(folder)
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert_computes_as(folder, model)


@pytest.mark.parametrize(
    ("settings", "changes", "tensors", "message"),
    [
        ({"quantization": "int8"}, {}, {}, "quantised already .gptq."),
        ({}, {"quant_method": "bitsandbytes"}, {}, "'bitsandbytes' is not supported"),
        ({}, {"bits": 8}, {}, r"proj\.qweight has the shape"),
        ({}, {}, {"q_proj.pre_quant_scale": torch.ones(48)}, "pre_quant_scale is a tensor that"),
        ({}, {}, {"q_proj.scales": None}, r"q_proj\.scales is missing"),
        ({}, {}, {"q_proj.qweight": None}, "q_proj has the tensors g_idx, qzeros, scales"),
        ({}, {}, {"q_norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}, "stored as F8_E4M3"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(
    settings: dict[str, Any],
    changes: dict[str, Any],
    tensors: dict[str, Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    config, pack = FORMATS["gptq"]
    folder = write(make_model("qwen3"), tmp_path, config | changes, pack)
    stored = load_file(folder / FILE)
    for name, tensor in tensors.items():
        stored[f"model.layers.1.self_attn.{name}"] = tensor  # type: ignore[assignment]
    stored = {name: each for name, each in stored.items() if each is not None}
    save_file(stored, folder / FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(folder, **settings)


def test_plain_weights_that_a_configuration_calls_quantised_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": GPTQ}))
    with pytest.raises(ModelError, match="take the section out"):
        load(folder)
