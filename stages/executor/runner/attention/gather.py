"""Attention in plain PyTorch, for any device and dtype: context is gathered from the cache.

Rows of one token are computed together by two batched matrix products over gathered context, in
which the query heads that share a KV head form the rows of one matrix: nothing is repeated. (With
one query each, `scaled_dot_product_attention` is several times slower on CPU.) Longer rows go the
way of `prefill`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..batch import IntArray, Rows
from ..kv_cache import MAX_GATHERED_TOKENS, KVCache
from ..loaded_model import AttentionOptions, LoadedModel
from .backend import QKV
from .prefill import (
    LayerKind,
    PrefillRow,
    for_each_kind,
    layer_kinds,
    prefill,
    prefill_rows,
    soft_cap,
    softmax,
)

_SLACK_TOKENS = 256
"""Padding that a decode row may always have: below it another chunk costs more than it saves."""


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Rows of one token each, of similar context length, computed together.

    Attributes:
        start: First token of the chunk in the batch.
        stop: One past its last.
        index: `[rows * kv_heads * length]`, as `KVCache.gather` takes it,
            ordered by row, then head, then position, so that gathering needs no transposition.
        bias: `[rows * kv_heads, 1, length]` in the model's dtype: 0 where the query may look,
            -inf where it may not.
        length: Positions per row, padding included.
    """

    start: int
    stop: int
    index: Tensor
    bias: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class GatherView:
    """A step as the layers of one kind see it."""

    decodes: tuple[DecodeChunk, ...]
    prefills: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class GatherBatch:
    """A step.

    Attributes:
        slots: `[tokens]`, the slot mapping.
        views: One per kind of layer.
    """

    slots: Tensor
    views: dict[LayerKind, GatherView]


class GatherBackend:
    """An AttentionBackend that gathers all context."""

    name: ClassVar[str] = "gather"

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        """For the kinds of layers and the dtype of a model, and blocks of so many tokens."""
        self._kinds = layer_kinds(model)
        self._dtype = model.dtype
        self._block_size = block_size

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> GatherBatch:
        def view(window: int | None, heads: int) -> GatherView:
            decodes = self._decode_chunks(rows, tables, contexts, window, heads)
            prefills = prefill_rows(rows, tables, window, heads, self._block_size)
            # Not tuple(): one that grows fails when another thread looks at all objects meanwhile,
            # as debuggers and memory profilers do.
            return GatherView((*decodes,), (*prefills,))

        return GatherBatch(slots, for_each_kind(self._kinds, rows, view))

    def forward(
        self, batch: GatherBatch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        queries, keys, values = qkv
        view = batch.views[options.window, keys.shape[1]]
        cache.store(layer, keys, values, batch.slots)
        parts = [
            _decode(chunk, queries, *cache.gather(layer, chunk.index), options)
            for chunk in view.decodes
        ]
        if view.prefills:
            parts += prefill(view.prefills, cache, layer, qkv, options)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_chunks(
        self, rows: Rows, tables: Tensor, contexts: Tensor, window: int | None, heads: int
    ) -> Iterator[DecodeChunk]:
        """Lays out the rows of one token for layers of one kind."""
        if not rows.num_decodes:
            return
        block_size = self._block_size
        lengths = rows.contexts[: rows.num_decodes]
        if window is not None:
            lengths = lengths - np.maximum(lengths - window, 0) // block_size * block_size
        head_range = torch.arange(heads, device=tables.device)[:, None]
        for start, stop in cut_chunks(lengths):
            length = int(lengths[start:stop].max())
            table, ends = tables[start:stop], contexts[start:stop, None]
            positions = torch.arange(length, device=tables.device)
            if window is None:
                hidden = positions >= ends
                blocks = table.index_select(1, positions // block_size)
            else:
                low = (ends - window).clamp_(min=0)
                absolute = low // block_size * block_size + positions
                hidden = (absolute >= ends) | (absolute < low)
                columns = (absolute // block_size).clamp_(max=table.shape[1] - 1)
                blocks = table.gather(1, columns)
            cache_rows = (blocks * block_size + positions % block_size) * heads
            index = (cache_rows[:, None] + head_range).view(-1)
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=tables.device)
            bias = bias.masked_fill_(hidden, float("-inf"))[:, None].expand(-1, heads, -1)
            yield DecodeChunk(start, stop, index, bias.reshape(-1, 1, length), length)


def cut_chunks(lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Cuts rows, sorted by falling length, into ranges (start, stop) of bounded padding.

    A chunk gathers at most MAX_GATHERED_TOKENS (one row alone may need more), and none of its rows
    is padded to more than twice its length plus a little.
    """
    start = 0
    while start < lengths.size:
        longest = int(lengths[start])
        by_memory = start + max(MAX_GATHERED_TOKENS // longest, 1)
        shortest = (longest - _SLACK_TOKENS) / 2
        by_padding = start + int(np.searchsorted(-lengths[start:], -shortest, side="right"))
        stop = max(min(by_memory, by_padding, lengths.size), start + 1)
        yield start, stop
        start = stop


def _decode(
    chunk: DecodeChunk, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """Rows of one token each: `[rows, heads, value_dim]`; keys and values as gathered."""
    scale, _, softcap, sinks = options
    rows, matrices = chunk.stop - chunk.start, chunk.bias.shape[0]
    grouped = queries[chunk.start : chunk.stop].reshape(matrices, -1, queries.shape[-1])
    keys = keys.view(matrices, chunk.length, -1)
    values = values.view(matrices, chunk.length, -1)
    if softcap is None:
        scores = torch.baddbmm(chunk.bias, grouped, keys.transpose(1, 2), alpha=scale)
    else:
        scores = soft_cap(torch.bmm(grouped, keys.transpose(1, 2)) * scale, softcap)
        scores = scores + chunk.bias
    if sinks is not None:
        sinks = sinks.view(matrices // rows, -1).repeat(rows, 1)
    return torch.bmm(softmax(scores, sinks), values).view(rows, queries.shape[1], -1)
