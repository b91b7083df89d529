"""Keys and values in the cache as codes of 8 bits, with a scale for each token and head.

A number is read as `code * scale` in float32, rounded to the activations' dtype. A head's scale is
the largest magnitude of its numbers divided by the largest code, rounded up to bfloat16. So a
token's codes depend on that token alone, and every path of attention reads the same numbers, also
of the tokens of its own step: how a prompt is cut, cached or copied doesn't matter.

A power of two as the scale would be a byte less for 64 numbers or more, and the product exact. But
int8 would use only 65 to 127 of its codes, and its mean error grow by half.

`kernels/attention_codes.h` has the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ....config import ModelError
from .loaded_model import LoadedModel

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

_LEAST_SCALE = 2.0**-100
"""Below it products would leave the normal range of float32, and all codes be 0 anyway."""

_PIECE = 1 << 13
"""Heads of tokens that are unpacked at a time, in memory that stays in the processor's caches."""


def keep_codes(model: LoadedModel, kv_dtype: Literal["int8", "fp8"]) -> LoadedModel:
    """Return a model whose keys and values are kept as codes.

    Raises:
        ModelError: The device or the model doesn't allow it.
    """
    setting = f"engine.kv_dtype is {kv_dtype!r}, which is"
    if model.device.type != "cpu":
        raise ModelError(f"{setting} for CPU, and this is {model.device}; set it to 'auto'")
    if any(spec.is_latent for spec in model.layers):
        raise ModelError(
            f"{setting} not for latents, whose rotated part needs a scale of its own; set it to "
            "'auto', or engine.latent_attention to 'off'"
        )
    codes = _DTYPES[kv_dtype]
    layers = (msgspec.structs.replace(spec, codes=codes) for spec in model.layers)
    return replace(model, layers=tuple(layers))


def keep_numbers(model: LoadedModel) -> LoadedModel:
    """Return the model with keys and values as numbers."""
    layers = (msgspec.structs.replace(spec, codes=None) for spec in model.layers)
    return replace(model, layers=tuple(layers))


def pack(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[..., width]` to codes, and the scales `[...]`: NaN if a number is not finite."""
    wide = numbers.float()
    most = wide.abs().amax(-1)
    bits = (most / _LARGEST[dtype]).clamp(min=_LEAST_SCALE).view(torch.int32)
    scales = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    codes = wide / scales.float()[..., None]
    if dtype is torch.int8:
        codes = codes.nan_to_num(0.0).round_()
    return codes.to(dtype), scales


def unpack(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes `[..., width]` and scales `[...]` to the numbers that attention reads."""
    return (codes.float() * scales.float()[..., None]).to(dtype)


class CacheCodes:
    """The codes of a cache's attention layers, and their scales.

    Attributes:
        dtype: Dtype of the numbers that attention reads.
        layers: Of each layer the codes of keys and of values,
            `[blocks, block_size, kv_heads, width]`, then the scales of each, without the width.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype

    def store(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `KVCache.store`, for a layer that has its own."""
        tensors = self.layers[layer]
        for which, numbers in enumerate((keys, values)):
            kept, kept_scales = tensors[which], tensors[which + 2]
            codes, scales = pack(numbers, kept.dtype)
            flat = kept.view(torch.uint8).view(-1, *codes.shape[1:])
            flat.index_copy_(0, slots, codes.view(torch.uint8))
            kept_scales.view(-1, scales.shape[1]).index_copy_(0, slots, scales)

    def gather(self, layer: int, which: int, index: Tensor, out: Tensor) -> None:
        """Unpack keys (`which` 0) or values (1) at `index`, as `KVCache.gather`, to `out`."""
        codes, scales = self.layers[layer][which], self.layers[layer][which + 2].view(-1)
        rows = codes.view(torch.uint8).view(-1, codes.shape[-1])
        for part, target in zip(torch.split(index, _PIECE), torch.split(out, _PIECE), strict=True):
            found = rows.index_select(0, part).view(codes.dtype)
            target.copy_(unpack(found, scales.index_select(0, part), self.dtype))

    def as_kept(self, layer: int, which: int, numbers: Tensor) -> Tensor:
        """Return new keys or values of a layer as attention reads them from the cache."""
        return unpack(*pack(numbers, self.layers[layer][which].dtype), self.dtype)
