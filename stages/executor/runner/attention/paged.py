"""Attention with a kernel that reads the paged cache in place, for rows of one token.

On CUDA that is `kernels.triton_decode`; `cpu` has what is for the CPU. Longer rows go the way of
`prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..batch import DecodeRows, Rows
from ..kv_cache import DecodeKernel, KVCache
from ..loaded_model import AttentionOptions, LoadedModel
from .backend import QKV
from .prefill import LayerKind, PrefillRow, for_each_kind, layer_kinds, prefill, prefill_rows


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Tokens whose last hidden states are read, where nobody reads the others.

    Attributes:
        index: `[read]` int64, where they are in the batch, rising.
        rows: They alone, as rows for the kernel.
    """

    index: Tensor
    rows: DecodeRows


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step.

    Attributes:
        slots: `[tokens]`, the slot mapping.
        decodes: The rows that the kernel takes.
        prefills: Those behind them, for each kind of layer; empty when there are none.
        read: The tokens that are read, if they are at most half of all; None for any.
    """

    slots: Tensor
    decodes: DecodeRows
    prefills: dict[LayerKind, tuple[PrefillRow, ...]] = field(default_factory=dict)
    read: ReadRows | None = None


class PagedBackend:
    """An AttentionBackend with a kernel, which it makes once for each layer of a cache."""

    name: ClassVar[str] = "paged"

    def __init__(self, model: LoadedModel, block_size: int, kernel: DecodeKernel) -> None:
        """For the kinds of layers of a model, blocks of so many tokens, and a kernel."""
        self._kinds = layer_kinds(model)
        self._block_size = block_size
        self._kernel = kernel

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        decodes = DecodeRows(rows.num_decodes, tables, contexts)
        if rows.num_decodes == rows.starts.size:
            return PagedBatch(slots, decodes)

        def layout(window: int | None, heads: int) -> tuple[PrefillRow, ...]:
            return tuple(prefill_rows(rows, tables, window, heads, self._block_size))

        return PagedBatch(slots, decodes, for_each_kind(self._kinds, rows, layout))

    def forward(
        self, batch: PagedBatch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        queries, keys, values = qkv
        paged = cache.paged_layer(layer, self._kernel, queries.shape[1], options)
        paged.store(_dense_rows(keys), _dense_rows(values), batch.slots)
        parts = []
        if batch.decodes.count:
            parts.append(paged.decode(_dense_rows(queries), batch.decodes))
        if batch.prefills:
            layout = batch.prefills[options.window, keys.shape[1]]
            parts += prefill(layout, cache, layer, qkv, options)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_rows(rows: Tensor) -> Tensor:
    """`[tokens, heads, dim]` with each row's heads side by side in memory."""
    dense = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if dense else rows.contiguous()
