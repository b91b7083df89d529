"""AWQ: codes and zero points of 4 bits, packed along the outputs in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.codes import PlainCodes, Scales
from .stored import (
    CheckpointFormat,
    ReadLayer,
    StoredLayer,
    integer_form,
    offsets_of,
    settings_of,
    unpack_bits,
    unsupported,
)

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight neighbouring outputs, the place of each in its word, from the lowest bits."""


class Settings(msgspec.Struct):
    """Fields of a quantization_config, in Transformers' names and in AutoAWQ's."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str = "gemm"
    format: str = "gemm"


class AWQ(CheckpointFormat):
    """Checkpoints of AutoAWQ in the layout "gemm"."""

    markers = frozenset({"qweight"})
    names = frozenset({"qweight", "qzeros", "scales"})
    label = "AWQ int4"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check the configuration.

        Raises:
            ModelError: A field has a wrong type or value.
        """
        own = settings_of(config, Settings)
        for layout in (own.version.lower(), own.format.lower()):
            if layout != "gemm":
                raise unsupported(f"quantization_config in config.json: the AWQ layout {layout!r}")
        if not own.zero_point:
            raise unsupported("quantization_config in config.json: AWQ without zero_point")
        bits = 4 if own.bits is own.w_bit is None else own.bits or own.w_bit
        if bits != 4:
            raise unsupported(f"quantization_config in config.json: AWQ of {bits} bits")
        sizes = [each for each in (own.group_size, own.q_group_size) if each is not None]
        self._group = sizes[0] if sizes else 128

    def read(self, layer: StoredLayer) -> ReadLayer:
        form = integer_form(layer, 4, self._group)
        if layer.outputs % 8:
            raise layer.error("qweight", f"can't hold {layer.outputs} outputs, 8 in each word")

        def unpacked(name: str, rows: int) -> Tensor:
            packed = layer.take(name, (torch.int32,), [(rows, layer.outputs // 8)])
            words = unpack_bits(packed, 4, layer.outputs).view(rows, -1, 8)
            return words[..., PLACES].flatten(1).T

        scales = layer.scales("scales", [(form.groups, layer.outputs)]).T.contiguous()
        offsets = offsets_of(form, scales, unpacked("qzeros", form.groups))
        codes = unpacked("qweight", layer.inputs)
        return ReadLayer(form, PlainCodes(codes, Scales(scales), offsets))
