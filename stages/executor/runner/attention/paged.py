"""Attention by a kernel that reads the paged cache in place, for rows of one token.

On the CPU the kernel is `cpu.c`'s. On CUDA it is `kernels.triton_decode`; longer rows are gathered
(`gather.PrefillRow`), or joined where flash attention computes them (`joined_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch
from torch import Tensor

from ..attention_options import AttentionOptions, Span
from ..batch import DecodeRows, Rows, Uploader
from ..kernels.cpu import PagedAttention
from ..kv_cache import DecodeKernel, KVCache
from ..loaded_model import LoadedModel
from .backend import QKV
from .gather import (
    LayerKind,
    PrefillRow,
    for_each_kind,
    layer_kinds,
    multiply_heads,
    prefill_rows,
)

if TYPE_CHECKING:
    from .joined_rows import JoinedRows


class ReadRows(msgspec.Struct, frozen=True):
    """The tokens whose last hidden states are read.

    Attributes:
        index: `[read]` int64, their indices in the batch, rising.
        rows: These tokens as rows for the kernel.
    """

    index: Tensor
    rows: DecodeRows


class PagedBatch(msgspec.Struct, frozen=True):
    """A step.

    Attributes:
        slots: `[tokens]`, the slot mapping.
        decodes: The rows for the kernel.
        prefills: The rows after them, for each kind of layer; empty for none.
        read: The tokens that are read, if at most half of all; else None.
    """

    slots: Tensor
    decodes: DecodeRows
    prefills: dict[LayerKind, tuple[PrefillRow | JoinedRows, ...]] = {}
    read: ReadRows | None = None


class PagedBackend:
    """An AttentionBackend with a kernel for each layer of a cache."""

    name: ClassVar[str] = "paged"
    multiply_heads = staticmethod(multiply_heads)

    def __init__(self, model: LoadedModel, block_size: int, kernel: DecodeKernel) -> None:
        """For the layers of a model, and a kernel."""
        self._kinds = layer_kinds(model)
        self._lay_out: Callable[..., Iterator[PrefillRow | JoinedRows]] = prefill_rows
        if model.device.type == "cuda":
            from .joined_rows import can_join_rows, join_rows

            if can_join_rows(model):
                self._lay_out = partial(join_rows, Uploader(model.device))
        self._block_size = block_size
        self._kernel = kernel

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        decodes = DecodeRows(rows.num_decodes, tables, contexts)
        if rows.num_decodes == rows.starts.size:
            return PagedBatch(slots, decodes)

        def layout(span: Span, heads: int) -> tuple[PrefillRow | JoinedRows, ...]:
            return (*self._lay_out(rows, tables, span, heads, self._block_size),)

        return PagedBatch(slots, decodes, for_each_kind(self._kinds, rows, layout))

    def forward(
        self, batch: PagedBatch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        queries, keys, values = qkv
        paged = cache.paged_layer(layer, self._kernel, queries.shape[1], options)
        if cache.specs[layer].source is None:
            paged.store(_dense_rows(keys), _dense_rows(values), batch.slots)
        parts = []
        if batch.decodes.count:
            parts.append(paged.decode(_dense_rows(queries), batch.decodes))
        if batch.prefills:
            layout = batch.prefills[options.span, keys.shape[1]]
            parts += [row.attend(cache, layer, qkv, options) for row in layout]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_rows(rows: Tensor) -> Tensor:
    """`[tokens, heads, dim]` with contiguous rows."""
    dense = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if dense else rows.contiguous()


class CpuBackend(PagedBackend):
    """An AttentionBackend whose kernel takes all tokens as rows of one, also those of prompts.

    A token's bits thus don't depend on how its prompt is cut.
    """

    @staticmethod
    def multiply_heads(rows: Tensor, matrices: Tensor, out: Tensor) -> None:
        # Most models need none of it.
        from ..kernels.heads import head_products

        head_products(rows, matrices, out)

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        """For a model that the kernel handles."""
        super().__init__(model, block_size, PagedAttention)

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        if rows.num_decodes == rows.starts.size:
            return super().prepare(rows, slots, tables, contexts)
        row_of_token, positions = rows.flat
        of_token = tables.index_select(0, torch.from_numpy(row_of_token))
        contexts = torch.from_numpy(positions + 1)
        read: ReadRows | None = None
        if rows.read is not None and 2 * len(rows.read) <= len(positions):
            index = torch.from_numpy(rows.read)
            some = DecodeRows(
                len(rows.read), of_token.index_select(0, index), contexts.index_select(0, index)
            )
            read = ReadRows(index, some)
        return PagedBatch(slots, DecodeRows(len(contexts), of_token, contexts), read=read)
