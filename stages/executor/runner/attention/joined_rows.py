"""Prompts and their chunks, after cached prefixes too, that attend in one call of flash attention
(PyTorch's, on CUDA).

One by one, many short ones would keep the host busy and the device waiting.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from ..attention_options import AttentionOptions, Span
from ..batch import IntArray, Rows, Uploader
from ..kv_cache import MAX_GATHERED_TOKENS, KVCache
from ..loaded_model import LoadedModel
from .backend import QKV
from .gather import PrefillRow, prefill_rows

_SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether query heads may share a KV head. Not in all versions."""


class JoinedRows(msgspec.Struct, frozen=True):
    """Adjacent rows of several tokens.

    Attributes:
        start: First token of the rows in the batch.
        stop: One past their last.
        index: `[context tokens * kv_heads]`, for `KVCache.gather`, ordered by row, position, head;
            None if all rows start their sequences, and their own keys and values are all.
        offsets: `[rows + 1]` int32, each row's first token from `start` on, and the end.
        context_offsets: `[rows + 1]` int32, each row's first key, and the end.
        longest: Tokens of the longest row.
        longest_context: Keys of the row that has most.
        window: As in Span.
    """

    start: int
    stop: int
    index: Tensor | None
    offsets: Tensor
    context_offsets: Tensor
    longest: int
    longest_context: int
    window: int | None

    def attend(self, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions) -> Tensor:
        """Compute these rows, `[tokens, heads, value_dim]`.

        Their keys and values must be in the cache.
        """
        queries, keys, values = (each[self.start : self.stop] for each in qkv)
        if self.index is None:
            keys, values = cache.as_kept(layer, keys, values)
        else:
            gathered = cache.gather(layer, self.index)
            keys, values = (each.view(-1, keys.shape[1], each.shape[1]) for each in gathered)
        shared: dict[str, Any] = {}
        if _SHARES_HEADS:
            shared["enable_gqa"] = keys.shape[1] != queries.shape[1]
        else:
            keys, values = (_repeated(part, queries.shape[1]) for part in (keys, values))
        # Queries are the last of a row's positions, to which a causal mask and a window refer.
        output = varlen_attn(
            queries,
            keys,
            values,
            self.offsets,
            self.context_offsets,
            self.longest,
            self.longest_context,
            scale=options.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            **shared,
        )
        assert isinstance(output, Tensor)
        return output


def can_join_rows(model: LoadedModel) -> bool:
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


def join_rows(
    upload: Uploader, rows: Rows, tables: Tensor, span: Span, heads: int, block_size: int
) -> Iterator[PrefillRow | JoinedRows]:
    """Lay out the rows after those of one token, for layers of one kind.

    Rows that see later tokens, as of images, or chunks of a sequence, attend one by one.
    """
    first = rows.num_decodes
    if rows.reach_of(span.window) is not None or span.chunk is not None:
        yield from prefill_rows(rows, tables, span, heads, block_size)
        return
    # From the start of the first block that a row sees.
    lows = span.first(rows.starts) // block_size * block_size
    contexts = rows.contexts - lows
    token = first
    while first < rows.starts.size:
        # As many as may be gathered at a time, at least one.
        fitting = int(np.searchsorted(contexts[first:].cumsum(), MAX_GATHERED_TOKENS, side="right"))
        some = slice(first, first + max(fitting, 1))
        counts, seen = rows.num_tokens[some], contexts[some]
        # Offsets, and the row and the position of each key, in one transfer.
        row = np.repeat(np.arange(some.start, some.start + len(seen)), seen)
        at = np.arange(len(row)) - np.repeat(seen.cumsum() - seen - lows[some], seen)
        numbers = upload(_offsets(counts), _offsets(seen), row, at)
        index = None
        if rows.starts[some].any():
            blocks = tables[numbers[2], numbers[3] // block_size]
            places = (blocks * block_size + numbers[3] % block_size) * heads
            index = (places[:, None] + torch.arange(heads, device=tables.device)).view(-1)
        stop = token + int(counts.sum())
        offsets, ends = (each.to(torch.int32) for each in numbers[:2])
        longest = int(counts.max()), int(seen.max())
        yield JoinedRows(token, stop, index, offsets, ends, *longest, span.window)
        first, token = first + len(seen), stop


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate(([0], counts.cumsum()))


def _repeated(part: Tensor, heads: int) -> Tensor:
    """`[tokens, kv_heads, dim]` to `[tokens, heads, dim]`."""
    tokens, kv_heads, dim = part.shape
    if kv_heads == heads:
        return part
    return part[:, :, None].expand(-1, -1, heads // kv_heads, -1).reshape(tokens, heads, dim)
