"""Rows of several tokens over gathered context, for every back end that has nothing better.

Each row goes by itself through `scaled_dot_product_attention`, with each KV head as a batch entry
whose query heads share a zero-stride view; with soft caps or sinks, where that can't be, through
two matrix products. Layers differ only in their window and their number of KV heads; what depends
on that is laid out once for each such kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..batch import Rows
from ..kv_cache import KVCache
from ..loaded_model import AttentionOptions, LoadedModel
from .backend import QKV

LayerKind = tuple[int | None, int]
"""(window, KV heads) of a layer."""

_MAX_SCORES = 1 << 25
"""Attention scores that the explicit path holds at a time (float32: 128 MiB)."""

_T = TypeVar("_T")


def layer_kinds(model: LoadedModel) -> tuple[LayerKind, ...]:
    """The kinds of layers that a model has."""
    return tuple(dict.fromkeys((spec.window, spec.num_kv_heads) for spec in model.layers))


def for_each_kind(
    kinds: Iterable[LayerKind], rows: Rows, make: Callable[[int | None, int], _T]
) -> dict[LayerKind, _T]:
    """`make(window, KV heads)` for all kinds; a window that no row has outgrown is no window."""
    longest = int(rows.contexts.max(initial=0))
    made: dict[LayerKind, _T] = {}
    for window, heads in kinds:
        effective = window if window is not None and window < longest else None
        if (effective, heads) not in made:
            made[effective, heads] = make(effective, heads)
        made[window, heads] = made[effective, heads]
    return made


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Several tokens of one sequence.

    Attributes:
        start: First token of the row in the batch.
        stop: One past its last.
        index: `[kv_heads * context]`, as `KVCache.gather` takes it, ordered by head, then
            position; None when nothing precedes the row, whose own keys and values are then all
            there is.
        mask: `[tokens, context]`, true where a query may look; None is causal.
    """

    start: int
    stop: int
    index: Tensor | None
    mask: Tensor | None


def prefill_rows(
    rows: Rows, tables: Tensor, window: int | None, heads: int, block_size: int
) -> Iterator[PrefillRow]:
    """Lays out the rows behind those of one token, for layers of one kind."""
    device = tables.device
    token = rows.num_decodes
    for row in range(rows.num_decodes, rows.starts.size):
        start, count = int(rows.starts[row]), int(rows.num_tokens[row])
        index = mask = None
        low = 0
        if start:
            if window is not None:
                low = max(start - window + 1, 0) // block_size * block_size
            positions = torch.arange(low, start + count, device=device)
            blocks = tables[row].index_select(0, positions // block_size)
            cache_rows = (blocks * block_size + positions % block_size) * heads
            index = (cache_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        if start or (window is not None and count > window):
            mask = visible(start, count, low, window, device)
        yield PrefillRow(token, token + count, index, mask)
        token += count


def prefill(
    layout: Sequence[PrefillRow], cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
) -> list[Tensor]:
    """Attention of these rows, `[tokens, heads, value_dim]` each, as `AttentionBackend.forward`.

    Their keys and values must be in the cache already.
    """
    queries, keys, values = qkv
    heads = keys.shape[1]
    explicit = options.softcap is not None or options.sinks is not None
    attend = _attend_explicitly if explicit else _attend
    parts = []
    for row in layout:
        part = slice(row.start, row.stop)
        if row.index is None:
            row_keys, row_values = keys[part].transpose(0, 1), values[part].transpose(0, 1)
        else:
            row_keys, row_values = cache.gather(layer, row.index)
            row_keys = row_keys.view(heads, -1, row_keys.shape[1])
            row_values = row_values.view(heads, -1, row_values.shape[1])
        parts.append(attend(row, queries[part], row_keys, row_values, options))
    return parts


def _attend(
    row: PrefillRow, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """One row, with keys and values that it may look at, `[kv_heads, context, dim]` each."""
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
    """As `_attend`, with the scores in hand, some queries at a time so that memory is bounded."""
    tokens, num_heads, dim = queries.shape
    heads, context, _ = keys.shape
    mask = visible(0, tokens, 0, None, queries.device) if row.mask is None else row.mask
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
    """Softmax over the last dimension in float32, given back in the scores' dtype.

    A sink takes part in the sum and is then left out. `sinks` is the scores' shape without the
    last dimension, or broadcasts to it.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    column = sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    with_sink = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(with_sink, dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(scores.dtype)


def visible(start: int, count: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """What queries at `start .. start + count - 1` see of positions `low .. start + count - 1`.

    Returns `[count, start + count - low]`, true where they may look.
    """
    queries = torch.arange(start, start + count, device=device)[:, None]
    positions = torch.arange(low, start + count, device=device)
    seen = positions <= queries
    if window is not None:
        seen &= positions > queries - window
    return seen
