"""FP8: floating-point numbers of 8 bits, with one scale, one per output, or one per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.codes import Codes, PlainCodes, Scales
from .float4 import exponents, read_nvfp4
from .stored import (
    CheckpointFormat,
    Positive,
    ReadLayer,
    StoredLayer,
    check_group,
    settings_of,
    unsupported,
)

SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Names of a weight's scales: DeepSeek's, vLLM's, DeepSeek V4's and Mistral's."""


class Settings(msgspec.Struct):
    """Fields of a quantization_config."""

    activation_scheme: str = "dynamic"
    weight_block_size: tuple[Positive, Positive] | None = None
    fmt: str = "e4m3"
    kv_cache_scheme: dict[str, Any] = {}


class FP8(CheckpointFormat):
    """Checkpoints with quant_method fp8, mxfp8 or fbgemm_fp8."""

    markers = frozenset(SCALES)
    names = frozenset({"weight", *SCALES})
    ignored = frozenset({"input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale"})
    label = "FP8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check the configuration.

        Raises:
            ModelError: A field has a wrong type or value.
        """
        own = settings_of(config, Settings)
        if not own.fmt.lower().replace("float8_", "").startswith("e4m3"):
            raise unsupported(f"quantization_config in config.json: FP8 numbers of {own.fmt!r}")
        self._block = own.weight_block_size or (128, 128)
        notes = ["activations are not quantised to FP8"]
        if own.kv_cache_scheme:
            notes.append("kv_cache_scheme is not applied")
        self.notes = tuple(notes)

    def read(self, layer: StoredLayer) -> ReadLayer:
        found = [name for name in SCALES if name in layer.tensors]
        if len(found) != 1:
            raise layer.error("weight", f"has {len(found)} tensors of scales, and must have one")
        return read_fp8(layer, found[0], [self._block, (1, 32)])


class ModelOpt(FP8):
    """Checkpoints of ModelOpt: FP8, or NVFP4 with two scales."""

    names = frozenset({"weight", "weight_scale", "weight_scale_2"})
    markers = frozenset({"weight_scale"})
    label = "ModelOpt"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check the configuration.

        Raises:
            ModelError: A field has a wrong type or value.
        """
        super().__init__(config)
        self.label = f"ModelOpt {config.get('quant_algo') or ''}".strip()
        self.notes = ("activations are not quantised",)
        if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
            self.notes += ("the quantisation of the KV cache is not applied",)

    def read(self, layer: StoredLayer) -> ReadLayer:
        if "weight_scale_2" not in layer.tensors:
            return super().read(layer)
        common = layer.scales("weight_scale_2", [(), (1,)])
        return read_nvfp4(layer, "weight", "weight_scale", common)


def read_fp8(layer: StoredLayer, scales: str, blocks: list[tuple[int, int]]) -> ReadLayer:
    """Return FP8 numbers and their scales by output and group.

    Args:
        layer: The layer.
        scales: The tensor of scales.
        blocks: Outputs and inputs of blocks with a scale, where there are such.
    """
    outputs, inputs = layer.outputs, layer.inputs
    codes = layer.take("weight", (torch.float8_e4m3fn,), [(outputs, inputs)])
    values, group = spread_scales(layer, scales, blocks)
    form = Codes(outputs, inputs, 8, check_group(group, inputs), numbers="float8_e4m3fn")
    return ReadLayer(form, PlainCodes(codes.view(torch.uint8), Scales(values)))


def spread_scales(
    layer: StoredLayer, name: str, blocks: list[tuple[int, int]]
) -> tuple[Tensor, int]:
    """Return scales by output and group, and the inputs of a group.

    Args:
        layer: The layer.
        name: The tensor: for all weights, by output, or by block.
        blocks: Outputs and inputs of a block.
    """
    outputs, inputs = layer.outputs, layer.inputs
    grids = [(-(-outputs // rows), -(-inputs // columns)) for rows, columns in blocks]
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1), *grids]
    found = layer.tensors.get(name)
    if found is not None and found.dtype in (torch.uint8, torch.float8_e8m0fnu):
        values = exponents(layer, name, shapes)
    else:
        values = layer.scales(name, shapes)
    shape = tuple(values.shape)
    for block, grid in zip(blocks, grids, strict=True):
        if shape == grid and grid != (1, 1):
            return values.repeat_interleave(block[0], 0)[:outputs], block[1]
    return values.reshape(-1, 1).expand(outputs, 1), -1
