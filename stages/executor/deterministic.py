"""Deterministic mode: where it may be used, and the check at load that it holds.

What makes it so is in `fixed_tiles` and `attention.tiled`; docs/determinism.md has the whole story.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...config import ModelError
from .attention.tiled import TiledBatch, check_attention
from .batch import IntArray, Rows
from .fixed_tiles import FixedTiles, require_cpu
from .inputs import InputBuilder, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel

_CHECKED_TOKENS = 24
_CHUNKS = (1, 1, 5, 1, 9)
"""Tokens of the steps in which the check computes what it computed at once before."""


class Determinism:
    """One lane's deterministic mode.

    Use: make it when the model is loaded, compute within `tiles`, and `check` before the first step
    and whenever the number of threads has changed.

    Attributes:
        tiles: Keeps all torch calls within it to fixed shapes.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, builder: InputBuilder) -> None:
        """Takes the lane's parts; the builder's back end is the TiledBackend.

        Raises:
            ModelError: The device or dtype is one for which nobody has verified anything.
        """
        require_cpu(model.device)
        if model.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"deterministic mode is not verified for {model.dtype}; set dtype to 'float32' or "
                "'bfloat16', or deterministic to false"
            )
        self._model = model
        self._cache = cache
        self._builder = builder
        self.tiles = FixedTiles()

    def check(self) -> None:
        """Compares the bits of one pass over some tokens with those of several beside neighbours.

        Overwrites some blocks of the cache, so no sequence may be there.

        Raises:
            ModelError: They differ, so this model on this machine can't be run like this.
        """
        room = self._cache.num_blocks * self._cache.block_size
        length = min(_CHECKED_TOKENS, self._model.max_model_len, room)
        generator = np.random.default_rng(0)
        ids = generator.integers(0, self._model.vocab_size, 2 * length)
        whole = self._logits(ids[:length], 0, ids[:0])
        parts = []
        start = 0
        for step in range(length):
            if start == length:
                break
            count = min(_CHUNKS[step % len(_CHUNKS)], length - start)
            neighbour = ids[length : length + 1 + 3 * step]
            parts.append(self._logits(ids[start : start + count], start, neighbour))
            start += count
        if not torch.equal(whole, torch.cat(parts)):
            raise ModelError(
                f"deterministic mode is impossible here: {type(self._model.module).__name__} gives "
                "a token other bits beside others than alone on this machine; set deterministic "
                "to false"
            )

    def _logits(self, ids: IntArray, start: int, neighbour: IntArray) -> Tensor:
        """Logits of the tokens from position `start` on, the last tokens of a batch of two."""
        size = self._cache.block_size
        width = -(-max(start + len(ids), len(neighbour)) // size)
        tables = np.full((2, width), self._cache.padding_block)
        own = np.arange(-(-(start + len(ids)) // size))
        tables[1, : len(own)] = own
        starts, counts = np.array([0, start]), np.array([len(neighbour), len(ids)])
        used = counts > 0
        rows = Rows(starts[used], counts[used], tables[used], 0)
        wanted = np.arange(len(neighbour), len(neighbour) + len(ids))
        inputs = self._builder.build(rows, np.concatenate((neighbour, ids)), wanted)
        with self.tiles:
            logits = model_forward(self._model.module, inputs, self._cache)
        batch: TiledBatch = inputs.attention
        with torch.inference_mode():
            for window, heads, group in batch.chunks:
                for spec in set(self._model.layers):
                    if (spec.window, spec.num_kv_heads) == (window, heads):
                        check_attention(group, spec.key_dim, spec.value_dim)
        return logits
