"""MXFP4 and NVFP4: numbers of 4 bits with a sign, two bits of exponent and one of mantissa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ......config import ModelError
from ...kernels.codes import Codes, PlainCodes, Scales
from .stored import (
    FLOATS,
    CheckpointFormat,
    ReadLayer,
    StoredLayer,
    check_group,
    unpack_bits,
    unsupported,
)

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice each number

ZERO = 12
TABLE = (*(ZERO + each for each in _MAGNITUDES), *(ZERO - each for each in _MAGNITUDES))
"""For each code, twice its number, and `ZERO` more."""


def float4_form(outputs: int, inputs: int, group: int) -> Codes:
    """Return the form of such numbers, whose scales are halved."""
    return Codes(outputs, inputs, 4, check_group(group, inputs), zero=ZERO, table=TABLE)


def read_mxfp4(layer: StoredLayer, codes: str, scales: str, group: int = 32) -> ReadLayer:
    """Return numbers whose scales are powers of two.

    Args:
        layer: The layer.
        codes: The tensor of codes, two in a byte.
        scales: The tensor of exponents.
        group: Inputs of a group.
    """
    form = float4_form(layer.outputs, layer.inputs, group)
    found = exponents(layer, scales, [(layer.outputs, form.groups)])
    return ReadLayer(form, PlainCodes(_take_codes(layer, codes), _halved(found)))


def read_nvfp4(layer: StoredLayer, codes: str, scales: str, common: Tensor) -> ReadLayer:
    """Return numbers of groups of 16, whose scales are FP8 times one factor.

    Args:
        layer: The layer.
        codes: The tensor of codes, two in a byte.
        scales: The tensor of FP8 scales.
        common: The factor.
    """
    form = float4_form(layer.outputs, layer.inputs, 16)
    dtypes = (torch.float8_e4m3fn, *FLOATS)
    found = layer.scales(scales, [(layer.outputs, form.groups)], dtypes)
    wide = found.float() * common.float().reshape(()) / 2
    return ReadLayer(form, PlainCodes(_take_codes(layer, codes), Scales(wide)))


def read_experts(
    name: str, blocks: Tensor | None, scales: Tensor | None
) -> tuple[Codes, list[PlainCodes]]:
    """Return the form of the experts of a layer of gpt-oss, and the codes of each.

    Args:
        name: The tensors' name, for errors.
        blocks: `[experts, outputs, groups, 16]` uint8, two codes in a byte.
        scales: `[experts, outputs, groups]` uint8, exponents.

    Raises:
        ModelError: One is missing, or doesn't fit the other.
    """
    if blocks is None or scales is None:
        missing = "blocks" if blocks is None else "scales"
        raise ModelError(f"{name}_{missing} is missing; copy or convert the checkpoint again")
    if blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape[:1] != blocks.shape[:1]:
        raise ModelError(
            f"{name}_blocks and {name}_scales have the shapes {list(blocks.shape)} and "
            f"{list(scales.shape)}, and must be [experts, outputs, groups, 16] and [experts, "
            "outputs, groups]; copy or convert the checkpoint again"
        )
    outputs, inputs = blocks.shape[1], blocks.shape[2] * 32
    experts = [
        read_mxfp4(
            StoredLayer(name, {"blocks": each.flatten(1), "scales": scale}, outputs, inputs),
            "blocks",
            "scales",
        )
        for each, scale in zip(blocks, scales, strict=True)
    ]
    kinds = {each.plain.scales.values.dtype for each in experts}
    if len(kinds) > 1:  # they are stacked
        experts = [
            each._replace(plain=PlainCodes(each.plain.codes, Scales(each.plain.scales.wide())))
            for each in experts
        ]
    return experts[0].form, [each.plain for each in experts]


def exponents(layer: StoredLayer, name: str, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return exponents (E8M0) as uint8, none of them NaN."""
    dtypes = (torch.uint8, torch.float8_e8m0fnu)
    found = layer.take(name, dtypes, shapes).view(torch.uint8)
    if (found == 255).any():
        raise layer.error(name, "has scales that are NaN; quantise the model again")
    return found


def _take_codes(layer: StoredLayer, name: str) -> Tensor:
    shape = layer.outputs, -(-layer.inputs // 2)
    return unpack_bits(layer.take(name, (torch.uint8, torch.int8), [shape]), 4, layer.inputs)


def _halved(found: Tensor) -> Scales:
    if found.all():
        return Scales(found - 1)
    # Half of the smallest power of two that an exponent can say.
    return Scales(Scales(found).wide() / 2)


class ExpertBlocks(CheckpointFormat):
    """Checkpoints of gpt-oss: MXFP4 in the experts alone, all of a layer in one tensor."""

    label = "MXFP4"
    markers = frozenset({"gate_up_proj_blocks", "down_proj_blocks"})
    names = markers | {"gate_up_proj_scales", "down_proj_scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Nothing of the configuration matters."""

    def read(self, layer: StoredLayer) -> ReadLayer:
        raise unsupported(f"MXFP4 in {layer.name}, which has no experts")
