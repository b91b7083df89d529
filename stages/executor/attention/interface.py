"""Our attention, registered with Transformers under the name `IMPLEMENTATION`.

A step's tokens come flattened to `[1, tokens]`. The step's `AttentionBatch` and the `KVCache` reach
this function as keyword arguments of the model's forward call, which Transformers hands down to the
attention of every layer; nothing is global. Keys and values are written to the cache first, so that
a query finds its own position there like all others.

Rows of one token are computed together by two batched matrix products over gathered context, in
which the query heads that share a KV head form the rows of one matrix: nothing is repeated. (With
one query each, `scaled_dot_product_attention` is several times slower on CPU.) Longer rows go one
by one through it, with each KV head as a batch entry whose query heads share a zero-stride view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ....config import ModelError
from ..batch import AttentionBatch, DecodeChunk, PrefillRow, visible
from .probe import LayerProbe, MaskProbe
from .tiled import TiledBatch, tiled_attention

if TYPE_CHECKING:
    from ..kv_cache import KVCache

IMPLEMENTATION = "nano_paged"
"""The name for `attn_implementation`."""

_MAX_SCORES = 1 << 25
"""Attention scores that the explicit path holds at a time (float32: 128 MiB)."""


def register_attention() -> None:
    """Makes the implementation known to Transformers. Repeating it changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, probe_mask)


def probe_mask(*, mask_function: Any, **_: Any) -> MaskProbe:
    """Gives the model the rule of the mask it wants, for the probe to check.

    Steps never come here: they pass a placeholder mask, which Transformers takes as it is.
    """
    return MaskProbe(mask_function)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_batch: AttentionBatch | TiledBatch | LayerProbe | None = None,
    kv_cache: KVCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for the whole batch.

    Args:
        module: The attention layer; `layer_idx` names its part of the cache.
        query: `[1, heads, tokens, key_dim]`.
        key: `[1, kv_heads, tokens, key_dim]`, rotated.
        value: `[1, kv_heads, tokens, value_dim]`.
        attention_mask: Ignored; the batch says what may be seen.
        scaling: Factor of the scores; 1/sqrt(key_dim) when None.
        sliding_window: The layer's window, None for full attention.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: `[heads]`, attention sinks: a score without a value in each softmax (GPT-OSS).
        attention_batch: The step; a TiledBatch takes deterministic mode's algorithm.
        kv_cache: The KVCache.
        others: Settings for other implementations.

    Returns:
        `[1, tokens, heads, value_dim]`, and None for the weights.

    Raises:
        ModelError: The model was called without a batch, or does not hand it down.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_batch, LayerProbe):
        options = {"window": sliding_window, "scale": scale, "softcap": softcap, "sinks": s_aux}
        probed = attention_batch.record(module, query, key, value, attention_mask, options, others)
        return probed, None
    if attention_batch is None or kv_cache is None:
        raise ModelError(
            f"{type(module).__name__} did not get attention_batch and kv_cache: the model does not "
            "hand keyword arguments down to its attention, or was called past model_forward()"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = attend(
        attention_batch,
        kv_cache,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        window=sliding_window,
        scale=scale,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def attend(
    batch: AttentionBatch | TiledBatch,
    cache: KVCache,
    layer: int,
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `paged_attention`, from tensors `[tokens, heads, dim]` to `[tokens, heads, value_dim]`."""
    options: Any = {"window": window, "scale": scale, "softcap": softcap, "sinks": sinks}
    if isinstance(batch, TiledBatch):
        return tiled_attention(batch, queries, new_keys, new_values, cache, layer, **options)
    heads = new_keys.shape[1]
    view = batch.views[window, heads]
    parts: list[Tensor] = []
    if batch.decode_rows is not None:
        paged = cache.paged_attention(layer, queries.shape[1], **options)
        paged.store(_dense_rows(new_keys), _dense_rows(new_values), batch.slots)
        if batch.decode_rows.count:
            parts.append(paged.decode(_dense_rows(queries), batch.decode_rows))
    else:
        for whole, new in ((cache.keys[layer], new_keys), (cache.values[layer], new_values)):
            whole.view(-1, *whole.shape[2:]).index_copy_(0, batch.slots, new)
        parts = [
            _decode(chunk, queries, *cache.gather(layer, chunk.index), heads, scale, softcap, sinks)
            for chunk in view.decodes
        ]
    for row in view.prefills:
        own = (new_keys[row.start : row.stop], new_values[row.start : row.stop])
        context = own if row.index is None else cache.gather(layer, row.index)
        context = _by_head(row, context, heads)
        row_queries = queries[row.start : row.stop]
        if softcap is None and sinks is None:
            parts.append(_prefill(row, row_queries, *context, scale))
        else:
            parts.append(_prefill_explicit(row, row_queries, *context, scale, softcap, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_rows(rows: Tensor) -> Tensor:
    """`[tokens, heads, dim]` with each row's heads side by side in memory."""
    dense = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if dense else rows.contiguous()


def _decode(
    chunk: DecodeChunk,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Rows of one token each: `[rows, heads, value_dim]`; keys and values as gathered."""
    rows = chunk.stop - chunk.start
    grouped = queries[chunk.start : chunk.stop].reshape(rows * heads, -1, queries.shape[-1])
    context_keys = keys.view(rows * heads, chunk.length, -1)
    context_values = values.view(rows * heads, chunk.length, -1)
    if softcap is None:
        scores = torch.baddbmm(chunk.bias, grouped, context_keys.transpose(1, 2), alpha=scale)
    else:
        scores = _soft_cap(torch.bmm(grouped, context_keys.transpose(1, 2)) * scale, softcap)
        scores = scores + chunk.bias
    if sinks is not None:
        sinks = sinks.view(1, heads, -1).expand(rows, -1, -1).reshape(rows * heads, -1)
    weights = _softmax(scores, sinks)
    return torch.bmm(weights, context_values).view(rows, queries.shape[1], -1)


def _by_head(row: PrefillRow, context: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values that a row may look at, `[kv_heads, context, dim]` each."""
    keys, values = context
    if row.index is None:
        return keys.transpose(0, 1), values.transpose(0, 1)
    return keys.view(heads, -1, keys.shape[-1]), values.view(heads, -1, values.shape[-1])


def _prefill(
    row: PrefillRow, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """One row of several tokens: `[tokens, heads, value_dim]`."""
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
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).reshape(tokens, num_heads, -1)


def _prefill_explicit(
    row: PrefillRow,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `_prefill`, with the scores in hand, some queries at a time so that memory is bounded."""
    tokens, num_heads, dim = queries.shape
    heads, context, _ = keys.shape
    mask = visible(0, tokens, 0, None, queries.device) if row.mask is None else row.mask
    step = max(_MAX_SCORES // (num_heads * context), 1)
    if sinks is not None:
        sinks = sinks.view(heads, -1, 1)
    parts = []
    for start in range(0, tokens, step):
        part = queries[start : start + step]
        grouped = part.view(part.shape[0], heads, -1, dim).permute(1, 2, 0, 3)
        group = grouped.shape[1]
        scores = torch.bmm(grouped.reshape(heads, -1, dim), keys.transpose(1, 2)) * scale
        if softcap is not None:
            scores = _soft_cap(scores, softcap)
        scores = scores.view(heads, group, -1, context)
        scores = scores.masked_fill(~mask[start : start + step], float("-inf"))
        weights = _softmax(scores, sinks).view(heads, -1, context)
        output = torch.bmm(weights, values).view(heads, group, part.shape[0], -1)
        parts.append(output.permute(2, 0, 1, 3).reshape(part.shape[0], num_heads, -1))
    return torch.cat(parts)


def _soft_cap(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
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
