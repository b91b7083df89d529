"""The layout of a block's bytes outside the KV cache."""

from __future__ import annotations

import hashlib
import sys

import msgspec
import torch
import xxhash
from torch import nn

from ..kv_cache import KVCache
from ..loaded_model import SCALES, LoadedModel

FORMAT = 2
"""Raised when the meaning of the bytes changes; blocks of other formats are misses."""


class BlockLayout(msgspec.Struct, frozen=True):
    """The memory layout of a block over all layers, per layer its keys, then its values; and of a
    snapshot of the recurrent state, layer by layer.

    Blocks and snapshots whose layouts differ in one field are never exchanged.

    Attributes:
        block_size: Tokens.
        layers: (KV heads, key width, value width) of each layer that has its own; the last is 0
            for values within keys.
        dtype: Dtype of the numbers; or of codes, and of their scales, which follow a layer's codes.
        states: (shape, dtype) of each tensor of a snapshot, in their order.
        order: Dimensions of a layer's keys, and of its values.
        endian: Byte order of the numbers.
        version: `FORMAT`.
    """

    block_size: int
    layers: tuple[tuple[int, int, int], ...]
    dtype: str
    states: tuple[tuple[tuple[int, ...], str], ...] = ()
    order: str = "token, head, width"
    endian: str = sys.byteorder
    version: int = FORMAT

    @classmethod
    def of(cls, model: LoadedModel, cache: KVCache) -> BlockLayout:
        """Return the layout of a model's blocks."""
        owners = (spec for spec in model.layers if spec.source is None)
        layers = tuple(
            (spec.num_kv_heads, spec.key_dim, 0 if spec.is_latent else spec.value_dim)
            for spec in owners
        )
        states = tuple((tuple(each.shape[1:]), _name(each.dtype)) for each in cache.in_slots)
        dtype = _name(model.dtypes.kv_cache)
        if codes := {_name(spec.codes) for spec in model.layers if spec.codes is not None}:
            dtype = f"{', '.join(sorted(codes))} with {_name(SCALES)} scales"
        return cls(cache.block_size, layers, dtype, states)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal for equal layouts only."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:32]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_digest(module: nn.Module, computation: str = "") -> str:
    """Return a digest of a model's weights, their names, dtypes, shapes and numbers, and of what
    else its KV depends on.

    Args:
        module: The model.
        computation: Digest of the rest.
    """
    digest = xxhash.xxh3_128(computation.encode())
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
