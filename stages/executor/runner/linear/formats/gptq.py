"""GPTQ: codes packed along the inputs, zero points along the outputs, groups in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from ......config import ModelError
from ...kernels.codes import Codes, PlainCodes, Scales
from .stored import (
    CheckpointFormat,
    ReadLayer,
    StoredLayer,
    group_order,
    integer_form,
    offsets_of,
    settings_of,
    unpack_bits,
    unsupported,
    words_of,
)


class Settings(msgspec.Struct):
    """Fields of a quantization_config; `dynamic` has other values for layers by pattern."""

    bits: int
    group_size: int = -1
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str = ""
    format: str = ""
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any]] = {}
    meta: dict[str, Any] = {}


class GPTQ(CheckpointFormat):
    """Checkpoints of AutoGPTQ, GPTQModel and AutoRound."""

    markers = frozenset({"qweight"})
    names = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check the configuration.

        Raises:
            ModelError: A field has a wrong type or value.
        """
        own = settings_of(config, Settings)
        layout = "marlin" if own.is_marlin_format else own.checkpoint_format or own.format
        if layout not in ("", "gptq", "gptq_v2"):
            raise unsupported(f"quantization_config in config.json: the GPTQ layout {layout!r}")
        self._subtracts = layout != "gptq_v2"
        # This program subtracts from a whole word of zero points, with borrows between them.
        self._borrows = "gptqmodel" in str(own.meta.get("quantizer", "")).lower()
        self._settings = own
        self._patterns = [
            (_compile(pattern), settings_of({**config, **changes}, Settings))
            for pattern, changes in own.dynamic.items()
            if not pattern.startswith("-:")
        ]
        self.label = f"GPTQ int{own.bits}{'' if own.sym else ' with zero points'}"

    def read(self, layer: StoredLayer) -> ReadLayer:
        matching = (each for pattern, each in self._patterns if pattern.match(layer.name))
        own = next(matching, self._settings)
        form, words = integer_form(layer, own.bits, own.group_size), (torch.int32,)
        shape = words_of(layer.inputs, own.bits), layer.outputs
        codes = unpack_bits(layer.take("qweight", words, [shape]).T, own.bits, layer.inputs)
        scales = layer.scales("scales", [(form.groups, layer.outputs)]).T.contiguous()
        shape = form.groups, words_of(layer.outputs, own.bits)
        zeros = self._zero_points(layer.take("qzeros", words, [shape]), own.bits, layer.outputs)
        order = _order(layer, form, is_sorted=not own.desc_act)
        if order is not None:
            codes = codes[:, order]
        offsets = offsets_of(form, scales, zeros.T)
        return ReadLayer(form, PlainCodes(codes, Scales(scales), offsets), order)

    def _zero_points(self, packed: Tensor, bits: int, outputs: int) -> Tensor:
        """`[groups, outputs]`; the first layout stores them less one."""
        if not self._subtracts:
            return unpack_bits(packed, bits, outputs)
        if self._borrows and 8 % bits == 0:
            ones = sum(1 << shift for shift in range(0, 32, bits))
            words = (packed.long() + ones) & 0xFFFFFFFF
            return unpack_bits(words.to(torch.uint32), bits, outputs)
        return unpack_bits(packed, bits, outputs) + 1 & (1 << bits) - 1


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("+:"))
    except re.error as error:
        raise ModelError(
            f"quantization_config in config.json: dynamic has the pattern {pattern!r}, which is no "
            f"regular expression: {error}; copy or convert the checkpoint again"
        ) from None


def _order(layer: StoredLayer, form: Codes, *, is_sorted: bool) -> Tensor | None:
    groups = layer.tensors.get("g_idx")
    if is_sorted and (groups is None or not groups.any()):
        return None
    return group_order(layer, "g_idx", form)
