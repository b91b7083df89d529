"""Quantised checkpoints: loaded models compute as Transformers' with the unpacked weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.runner.linear.quantized import (
    QuantizedLinear,
    ReorderedLinear,
)

from ..models import make_model, save
from ..plans import Generation, Planner
from .linear.formats.packers import Integers, awq, gptq, pack_rows

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
    model: Any, folder: Path, config: Mapping[str, Any], pack: Pack, excluded: str = "lm_head"
) -> Path:
    """Save a model whose linear layers are quantised, and give it their weights.

    Args:
        model: A model of Transformers.
        folder: Its new folder.
        config: The quantization_config.
        pack: The format.
        excluded: A part of the names of layers that stay plain.
    """
    stored: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and excluded not in name:
            tensors, weight = pack(name, module.weight.data.float())
            module.weight.data = weight.to(module.weight.dtype)
            stored |= {f"{name}.{own}": each.contiguous() for own, each in tensors.items()}
    save(model, folder)
    owners = {name.rpartition(".")[0] for name in stored}
    kept = load_file(folder / FILE)
    kept = {name: each for name, each in kept.items() if name.removesuffix(".weight") not in owners}
    save_file(kept | stored, folder / FILE, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return folder


def assert_computes_as(folder: Path, model: Any, **settings: Any) -> Any:
    """Check a folder's tokens and logprobs against a model of Transformers; return its model."""
    config = EngineConfig(
        model_path=str(folder), block_size=4, max_model_len=64, device="cpu", **settings
    )
    generation = Generation(1, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6))
    core = ExecutorCore(config)
    Planner(core).run([generation])
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
    model = make_model("qwen2", tie_word_embeddings=False)
    loaded = assert_computes_as(write(model, tmp_path, config, pack), model)
    kind = ReorderedLinear if name == "act-order" else QuantizedLinear
    layers = [each for each in loaded.module.modules() if isinstance(each, kind)]
    assert len(layers) == 3 * 7
    assert type(loaded.module.lm_head) is nn.Linear
    assert loaded.quantization
