"""Attention by a kernel that reads the paged cache in place, for rows of one token.

On the CPU the kernel is `cpu.c`'s. On CUDA it is `kernels.triton_decode`; longer rows are gathered
(`gather.PrefillRow`), or joined in one call of PyTorch's flash attention if they are whole prompts:
one by one, many short prompts would keep the host busy and the device waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from ..attention_options import AttentionOptions, Span
from ..batch import DecodeRows, Rows
from ..kernels.cpu import PagedAttention, head_products
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


class ReadRows(msgspec.Struct, frozen=True):
    """The tokens whose last hidden states are read.

    Attributes:
        index: `[read]` int64, their indices in the batch, rising.
        rows: These tokens as rows for the kernel.
    """

    index: Tensor
    rows: DecodeRows


class WholePrompts(msgspec.Struct, frozen=True):
    """Adjacent rows that start their sequences, and see all tokens before them.

    Attributes:
        start: First token of the rows in the batch.
        stop: One past their last.
        offsets: `[rows + 1]` int32, each row's first token from `start` on, and the end.
        longest: Tokens of the longest row.
    """

    start: int
    stop: int
    offsets: Tensor
    longest: int

    def attend(self, _cache: KVCache, _layer: int, qkv: QKV, options: AttentionOptions) -> Tensor:
        """Compute these rows, `[tokens, heads, value_dim]`."""
        tokens = slice(self.start, self.stop)
        queries = qkv[0][tokens]
        # Not all versions of varlen_attn let query heads share a KV head.
        keys, values = (_repeated(part[tokens], queries.shape[1]) for part in qkv[1:])
        limits = self.offsets, self.offsets, self.longest, self.longest
        output = varlen_attn(
            queries, keys, values, *limits, scale=options.scale, window_size=(-1, 0)
        )
        assert isinstance(output, Tensor)
        return output


def can_join_prompts(model: LoadedModel) -> bool:
    """Return whether the device's flash attention computes all layers of a model."""
    if model.device.type != "cuda" or torch.version.hip:
        return False
    if model.dtypes.activations not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return False
    plain = all(each.softcap is None and each.sinks is None for each in model.attention_options)
    return plain and all(
        layer.key_dim == layer.value_dim and layer.key_dim % 8 == 0 and layer.key_dim <= 256
        for layer in model.layers
    )


def join_prompts(
    layout: Sequence[PrefillRow], contexts: Tensor
) -> Iterator[PrefillRow | WholePrompts]:
    """Replace adjacent whole prompts of a layout by one entry.

    Args:
        layout: Rows after those of one token.
        contexts: `[rows]`, their contexts, on the device: of a whole prompt, its length.
    """
    row = 0
    for whole, group in groupby(layout, lambda each: each.index is None and each.mask is None):
        rows = list(group)
        if whole and len(rows) > 1:
            ends = contexts[row : row + len(rows)].cumsum(0)
            offsets = F.pad(ends, (1, 0)).to(torch.int32)
            longest = max(each.stop - each.start for each in rows)
            yield WholePrompts(rows[0].start, rows[-1].stop, offsets, longest)
        else:
            yield from rows
        row += len(rows)


def _repeated(part: Tensor, heads: int) -> Tensor:
    """`[tokens, kv_heads, dim]` to `[tokens, heads, dim]`."""
    tokens, kv_heads, dim = part.shape
    if kv_heads == heads:
        return part
    return part[:, :, None].expand(-1, -1, heads // kv_heads, -1).reshape(tokens, heads, dim)


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
    prefills: dict[LayerKind, tuple[PrefillRow | WholePrompts, ...]] = {}
    read: ReadRows | None = None


class PagedBackend:
    """An AttentionBackend with a kernel for each layer of a cache."""

    name: ClassVar[str] = "paged"
    multiply_heads = staticmethod(multiply_heads)

    def __init__(self, model: LoadedModel, block_size: int, kernel: DecodeKernel) -> None:
        """For the layers of a model, and a kernel."""
        self._kinds = layer_kinds(model)
        self._joins_prompts = can_join_prompts(model)
        self._block_size = block_size
        self._kernel = kernel

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        decodes = DecodeRows(rows.num_decodes, tables, contexts)
        if rows.num_decodes == rows.starts.size:
            return PagedBatch(slots, decodes)

        def layout(span: Span, heads: int) -> tuple[PrefillRow | WholePrompts, ...]:
            found = (*prefill_rows(rows, tables, span, heads, self._block_size),)
            if not self._joins_prompts:
                return found
            return (*join_prompts(found, contexts[rows.num_decodes :]),)

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

    multiply_heads = staticmethod(head_products)

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
