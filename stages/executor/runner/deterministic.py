"""Deterministic mode: its preconditions, and the check at load that it holds.

The means are our kernels, or else `fixed_tiles` and `attention.tiled`; see docs/determinism.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....config import ModelError
from .attention.tiled import TiledBatch, check_attention
from .batch import IntArray, Rows
from .fast_modules.modules import FastModules
from .fixed_tiles import FixedTiles, require_cpu
from .inputs import InputBuilder, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel

_CHECKED_TOKENS = 24
_OTHERS = 75
"""Neighbouring tokens in the batch."""

_CHUNKS = (1, 5, 1, 9, 8)
"""Tokens of the check's small steps, compared with one large step."""


@dataclass(eq=False)
class Determinism:
    """Deterministic mode of one model.

    Compute within `active()`. Call `check` before the first step and after the number of threads
    has changed.

    Attributes:
        model: The model.
        cache: Its cache.
        builder: With a TiledBackend or a CpuBackend.
        fast_modules: The modules that run with kernels; None for none.
        tiles: The tiles of the fast modules.
    """

    model: LoadedModel
    cache: KVCache
    builder: InputBuilder
    fast_modules: FastModules | None
    tiles: FixedTiles

    def __post_init__(self) -> None:
        """Raises ModelError if the device or dtype is not verified."""
        require_cpu(self.model.device)
        dtype = self.model.dtypes.weights
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"deterministic mode is not verified for {dtype}; set dtype to 'float32' or "
                "'bfloat16', or deterministic to false"
            )

    def active(self) -> AbstractContextManager[object]:
        """Context in which kernels compute what they support, and torch the rest in fixed shapes.

        A model that the kernels compute as a whole needs no function mode.
        """
        fast = self.fast_modules
        return fast.active() if fast is not None and fast.is_whole else self.in_tiles()

    @contextmanager
    def in_tiles(self, *, alone: bool = False) -> Iterator[None]:
        """Context in which torch computes in fixed shapes; `alone` as in FastModules."""
        fast = self.fast_modules
        with self.tiles, nullcontext() if fast is None else fast.active(alone=alone):
            yield

    def check(self) -> None:
        """Compare the bits of one pass with those of several small passes beside neighbours.

        Overwrites some blocks of the cache, so there must be no sequences.

        Raises:
            ModelError: The bits differ: this model can't be deterministic on this machine.
        """
        room = self.cache.num_blocks * self.cache.block_size
        length = min(_CHECKED_TOKENS, self.model.max_model_len, room)
        generator = np.random.default_rng(0)
        ids = generator.integers(0, self.model.vocab_size, 2 * length)
        # Enough rows for several blocks of a product and a remainder.
        others = np.resize(ids[length:], min(_OTHERS, self.model.max_model_len))
        whole = self._logits(ids[:length], 0, others)
        parts = []
        start = 0
        for step in range(length):
            if start == length:
                break
            count = min(_CHUNKS[step % len(_CHUNKS)], length - start)
            neighbour = ids[length : length + 1 + 5 * step]
            parts.append(self._logits(ids[start : start + count], start, neighbour))
            start += count
        if not torch.equal(whole, torch.cat(parts)):
            raise ModelError(
                f"deterministic mode is impossible here: {type(self.model.module).__name__} "
                "gives a token other bits in a batch than alone on this machine; set "
                "deterministic to false"
            )

    def _logits(self, ids: IntArray, start: int, neighbour: IntArray) -> Tensor:
        """Return the logits of tokens from position `start`, in a batch after a neighbour."""
        size = self.cache.block_size
        width = -(-max(start + len(ids), len(neighbour)) // size)
        tables = np.full((2, width), self.cache.padding_block)
        own = np.arange(-(-(start + len(ids)) // size))
        tables[1, : len(own)] = own
        starts, counts = np.array([0, start]), np.array([len(neighbour), len(ids)])
        used = counts > 0
        states = None if self.model.mixers is None else np.flatnonzero(used)
        rows = Rows(starts[used], counts[used], tables[used], 0, states=states)
        wanted = np.arange(len(neighbour), len(neighbour) + len(ids))
        inputs = self.builder.build(rows, np.concatenate((neighbour, ids)), wanted)
        with self.active():
            logits = model_forward(self.model.module, inputs, self.cache)
        if isinstance(inputs.attention, TiledBatch):
            self._check_attention(inputs.attention)
        return logits

    @torch.inference_mode()
    def _check_attention(self, batch: TiledBatch) -> None:
        for span, heads, group in batch.chunks:
            for spec in set(self.model.layers):
                if (spec.span, spec.num_kv_heads) == (span, heads):
                    check_attention(group, spec.key_dim, spec.value_dim)
