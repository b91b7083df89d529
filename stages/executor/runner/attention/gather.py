"""Attention in plain PyTorch, for any device and dtype: context is gathered from the cache.

Rows of one token are computed together by two batched matrix products over gathered context, in
which the query heads that share a KV head form the rows of one matrix: nothing is repeated. (With
one query each, `scaled_dot_product_attention` is several times slower on the CPU.)

Longer rows, also those of other back ends, run one by one through `scaled_dot_product_attention`,
with each KV head as a batch entry whose query heads share a zero-stride view; with soft caps or
sinks, through two matrix products. The layout of a step depends on the span and the number of KV
heads, so it is made once for each such kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention_options import AttentionOptions, Span
from ..batch import IntArray, Rows
from ..kv_cache import MAX_GATHERED_TOKENS, KVCache
from ..loaded_model import LoadedModel
from .backend import QKV

LayerKind = tuple[Span, int]
"""(span, KV heads) of a layer."""

_MAX_SCORES = 1 << 25
"""Attention scores in memory at a time, without SDPA (float32: 128 MiB)."""

_T = TypeVar("_T")


def layer_kinds(model: LoadedModel) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of a model."""
    return tuple(dict.fromkeys((spec.span, spec.num_kv_heads) for spec in model.layers))


def for_each_kind(
    kinds: Iterable[LayerKind], rows: Rows, make: Callable[[Span, int], _T]
) -> dict[LayerKind, _T]:
    """Return `make(span, KV heads)` for all kinds; a span longer than all rows sees all, unless
    windows differ in more."""
    longest = int(rows.contexts.max(initial=1))
    made: dict[LayerKind, _T] = {}
    for span, heads in kinds:
        effective = span if span.first(longest - 1) or rows.reach_in_windows else Span()
        if (effective, heads) not in made:
            made[effective, heads] = make(effective, heads)
        made[span, heads] = made[effective, heads]
    return made


class PrefillRow(msgspec.Struct, frozen=True):
    """Several tokens of one sequence.

    Attributes:
        start: First token of the row in the batch.
        stop: One past its last.
        index: `[kv_heads * context]`, for `KVCache.gather`, ordered by head, then position; None if
            the row starts its sequence, and its own keys and values are all.
        mask: `[tokens, context]`, true where a query may attend; None is causal.
    """

    start: int
    stop: int
    index: Tensor | None
    mask: Tensor | None

    def attend(self, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions) -> Tensor:
        """Compute attention of the row, `[tokens, heads, value_dim]`.

        Its keys and values must be in the cache.
        """
        queries, keys, values = (each[self.start : self.stop] for each in qkv)
        explicit = options.softcap is not None or options.sinks is not None
        attend = _attend_explicitly if explicit else _attend
        if self.index is None:
            keys, values = cache.as_kept(layer, keys, values)
            return attend(self, queries, keys.transpose(0, 1), values.transpose(0, 1), options)
        heads, gathered = keys.shape[1], cache.gather(layer, self.index)
        keys, values = (each.view(heads, -1, each.shape[1]) for each in gathered)
        return attend(self, queries, keys, values, options)


def prefill_rows(
    rows: Rows, tables: Tensor, span: Span, heads: int, block_size: int
) -> Iterator[PrefillRow]:
    """Lay out the rows after those of one token, for layers of one kind."""
    device = tables.device
    token = rows.num_decodes
    for row in range(rows.num_decodes, rows.starts.size):
        start, count = int(rows.starts[row]), int(rows.num_tokens[row])
        index = mask = None
        low = 0
        if start:
            low = span.first(start) // block_size * block_size
            positions = torch.arange(low, start + count, device=device)
            blocks = tables[row].index_select(0, positions // block_size)
            cache_rows = (blocks * block_size + positions % block_size) * heads
            index = (cache_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        if (reach := rows.reach_of(span.window)) is not None:
            reach = reach[token : token + count]
            if (reach == np.arange(start, start + count)).all():
                reach = None
        if start or span.first(count - 1) or reach is not None:
            mask = visible(start, count, low, span, device, reach)
        yield PrefillRow(token, token + count, index, mask)
        token += count


def _attend(
    row: PrefillRow, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute one row, with keys and values of its context, `[kv_heads, context, dim]` each."""
    tokens, num_heads, dim = queries.shape
    heads = keys.shape[0]
    grouped = queries.view(tokens, heads, -1, dim).permute(1, 2, 0, 3)
    group = grouped.shape[1]
    output = F.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=options.scale,
    )
    return output.permute(2, 0, 1, 3).reshape(tokens, num_heads, -1)


def _attend_explicitly(
    row: PrefillRow, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend like `_attend`, with explicit scores, a few queries at a time to bound the memory."""
    tokens, num_heads, dim = queries.shape
    heads, context, _ = keys.shape
    mask = visible(0, tokens, 0, Span(), queries.device) if row.mask is None else row.mask
    step = max(_MAX_SCORES // (num_heads * context), 1)
    sinks = None if options.sinks is None else options.sinks.view(heads, -1, 1)
    parts = []
    for start in range(0, tokens, step):
        part = queries[start : start + step]
        grouped = part.view(part.shape[0], heads, -1, dim).permute(1, 2, 0, 3)
        group = grouped.shape[1]
        scores = torch.bmm(grouped.reshape(heads, -1, dim), keys.transpose(1, 2)) * options.scale
        if options.softcap is not None:
            scores = soft_cap(scores, options.softcap)
        scores = scores.view(heads, group, -1, context)
        scores = scores.masked_fill(~mask[start : start + step], float("-inf"))
        weights = softmax(scores, sinks).view(heads, -1, context)
        output = torch.bmm(weights, values).view(heads, group, part.shape[0], -1)
        parts.append(output.permute(2, 0, 1, 3).reshape(part.shape[0], num_heads, -1))
    return torch.cat(parts)


def soft_cap(scores: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scores / softcap)."""
    return torch.tanh(scores / softcap) * softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension in float32, returned in the scores' dtype.

    A sink adds to the sum only. `sinks` has the scores' shape without the last dimension, or
    broadcasts to it.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    column = sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    with_sink = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(with_sink, dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(scores.dtype)


def visible(
    start: int,
    count: int,
    low: int,
    span: Span,
    device: torch.device,
    reach: IntArray | None = None,
) -> Tensor:
    """Return the mask of queries from `start` on over positions from `low` on:
    `[count, start + count - low]`, true where a query may attend. `reach`: `[count]`, the last
    position of each; its own if None."""
    queries = torch.arange(start, start + count, device=device)[:, None]
    positions = torch.arange(low, start + count, device=device)
    seen = positions <= (queries if reach is None else torch.from_numpy(reach).to(device)[:, None])
    if span != Span():
        seen &= positions >= span.first(queries)
    return seen


_SLACK_TOKENS = 256
"""Padding of a decode row that costs less than another chunk."""


class DecodeChunk(msgspec.Struct, frozen=True):
    """Rows of one token each, of similar context length, computed together.

    Attributes:
        start: First token of the chunk in the batch.
        stop: One past its last.
        index: `[rows * kv_heads * length]`, for `KVCache.gather`, ordered by row, head, position,
            so that no transposition is needed.
        bias: `[rows * kv_heads, 1, length]` in the model's dtype: 0 where the query may attend,
            -inf elsewhere.
        length: Positions per row, padding included.
    """

    start: int
    stop: int
    index: Tensor
    bias: Tensor
    length: int

    def attend(self, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions) -> Tensor:
        """Compute attention of the rows, `[rows, heads, value_dim]`.

        Their keys and values must be in the cache.
        """
        scale, softcap, sinks = options.scale, options.softcap, options.sinks
        rows, matrices = self.stop - self.start, self.bias.shape[0]
        queries = qkv.queries[self.start : self.stop]
        grouped = queries.reshape(matrices, -1, queries.shape[-1])
        gathered = cache.gather(layer, self.index)
        keys, values = (each.view(matrices, self.length, -1) for each in gathered)
        if softcap is None:
            scores = torch.baddbmm(self.bias, grouped, keys.transpose(1, 2), alpha=scale)
        else:
            scores = soft_cap(torch.bmm(grouped, keys.transpose(1, 2)) * scale, softcap)
            scores = scores + self.bias
        if sinks is not None:
            sinks = sinks.view(matrices // rows, -1).repeat(rows, 1)
        return torch.bmm(softmax(scores, sinks), values).view(rows, queries.shape[1], -1)


class GatherBatch(msgspec.Struct, frozen=True):
    """A step.

    Attributes:
        slots: `[tokens]`, the slot mapping.
        parts: All rows, for each kind of layer.
    """

    slots: Tensor
    parts: dict[LayerKind, tuple[DecodeChunk | PrefillRow, ...]]


def multiply_heads(rows: Tensor, matrices: Tensor, out: Tensor) -> None:
    """As `AttentionBackend.multiply_heads`."""
    out.copy_(torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1))


class GatherBackend:
    """An AttentionBackend that gathers all context."""

    name: ClassVar[str] = "gather"
    multiply_heads = staticmethod(multiply_heads)

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        """For the layers and the dtype of a model."""
        self._kinds = layer_kinds(model)
        self._dtype = model.dtypes.activations
        self._block_size = block_size

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> GatherBatch:
        def layout(span: Span, heads: int) -> tuple[DecodeChunk | PrefillRow, ...]:
            decodes = self._decode_chunks(rows, tables, contexts, span, heads)
            # Not tuple(): while it grows, debuggers and memory profilers that walk all objects from
            # another thread make it fail.
            return (*decodes, *prefill_rows(rows, tables, span, heads, self._block_size))

        return GatherBatch(slots, for_each_kind(self._kinds, rows, layout))

    def forward(
        self, batch: GatherBatch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        cache.store(layer, qkv.keys, qkv.values, batch.slots)
        layout = batch.parts[options.span, qkv.keys.shape[1]]
        parts = [part.attend(cache, layer, qkv, options) for part in layout]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_chunks(
        self, rows: Rows, tables: Tensor, contexts: Tensor, span: Span, heads: int
    ) -> Iterator[DecodeChunk]:
        """Lay out the rows of one token for layers of one kind."""
        if not rows.num_decodes:
            return
        block_size = self._block_size
        lengths = rows.contexts[: rows.num_decodes]
        lengths = lengths - span.first(lengths - 1) // block_size * block_size
        head_range = torch.arange(heads, device=tables.device)[:, None]
        # Rows fall in context, not in what they see of it.
        most = np.maximum.accumulate(lengths[::-1])[::-1]
        for start, stop in cut_chunks(most):
            length = int(lengths[start:stop].max())
            table, ends = tables[start:stop], contexts[start:stop, None]
            positions = torch.arange(length, device=tables.device)
            if span == Span():
                hidden = positions >= ends
                blocks = table.index_select(1, positions // block_size)
            else:
                low = span.first(ends - 1)
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
    """Cut rows, sorted by falling length, into ranges (start, stop) of bounded padding.

    A chunk gathers at most MAX_GATHERED_TOKENS, unless one row needs more, and pads no row to more
    than about twice its length.
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
