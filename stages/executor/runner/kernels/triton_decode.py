"""Decode attention on CUDA: one query per sequence, read straight from the paged cache.

Written in Triton, which comes with PyTorch's CUDA builds. Its shapes depend on the batch and not on
the sequences' lengths, so it can be part of a CUDA graph: each context is cut into the same number
of splits (flash decoding, Dao and others, 2023), which a second kernel joins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_options import AttentionOptions
from ..batch import DecodeRows

_TILE = 128
"""The most positions per iteration of a program."""

_TILE_BYTES = 1 << 14
"""The most bytes of their keys: prefetched tiles must fit into shared memory."""

_PROGRAMS = 512
"""The target number of programs: a few per multiprocessor of a large device."""

_MOST_SPLITS = 64


@triton.jit
def _load_rows(whole, at, real, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`[rows, padded]`: the rows `at` of a tensor, zero where a row is not `real`."""
    column = tl.arange(0, PADDED)
    return tl.load(
        whole + at[:, None] * WIDTH + column[None, :],
        mask=real[:, None] & (column[None, :] < WIDTH),
        other=0.0,
    )


@triton.jit
def _store_rows(whole, at, real, rows, WIDTH: tl.constexpr):
    """Writes `[rows, padded]` to the rows `at` of a tensor, those that are `real`."""
    column = tl.arange(0, rows.shape[1])
    tl.store(
        whole + at[:, None] * WIDTH + column[None, :],
        rows,
        mask=real[:, None] & (column[None, :] < WIDTH),
    )


@triton.jit
def _bounds(context, split, splits, WINDOW: tl.constexpr, OWN_CHUNK: tl.constexpr):
    """The first position of a split, and the one after its last."""
    low = context * 0
    if WINDOW:
        low = tl.maximum(context - WINDOW, 0)
    if OWN_CHUNK:
        low = (context - 1) // OWN_CHUNK * OWN_CHUNK
    length = tl.cdiv(context - low, splits)
    start = low + split * length
    return start, tl.minimum(start + length, context)


@triton.jit
def _scores(query, keys, at, real, scale, softcap, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr):
    """`[query rows, keys]`: scores of the keys `at`; minus infinity where not `real`."""
    column = tl.arange(0, query.shape[1])
    key = tl.load(
        keys + at[None, :] * WIDTH + column[:, None],
        mask=real[None, :] & (column[:, None] < WIDTH),
        other=0.0,
    )
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return tl.where(real[None, :], scores, float("-inf"))


# Arguments that differ between calls are not specialised, so a layer's kernel is compiled once.
@triton.jit(
    do_not_specialize=["query_stride", "table_stride", "splits"],
    do_not_specialize_on_alignment=["tables", "contexts"],
)
def _attend_split(
    queries,
    keys,
    values,
    tables,
    contexts,
    partial,
    largest,
    totals,
    query_stride,
    table_stride,
    splits,
    scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    OWN_CHUNK: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One split of one row for the query heads of one KV head: an unfinished softmax."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start, stop = _bounds(tl.load(contexts + row), split, splits, WINDOW, OWN_CHUNK)

    member = tl.arange(0, PADDED_GROUP)
    real = member < GROUP
    head = kv_head * GROUP + member
    query = _load_rows(queries + row * query_stride, head, real, KEY_WIDTH, PADDED_KEY)
    best = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    output = tl.zeros([PADDED_GROUP, PADDED_VALUE], tl.float32)
    for first in range(start, stop, TILE):
        position = first + tl.arange(0, TILE)
        seen = position < stop
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        place = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head
        scores = _scores(query, keys, place, seen, scale, softcap, KEY_WIDTH, SOFTCAP)
        # The first position of a tile is always seen, so no row is without a finite score.
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        value = _load_rows(values, place, seen, VALUE_WIDTH, PADDED_VALUE)
        weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        output = output * shrink[:, None] + weighted
        total = total * shrink + tl.sum(weights, 1)
        best = new_best

    # Empty splits have no total, and minus infinity as the largest.
    at = (row * KV_HEADS * GROUP + head) * splits + split
    tl.store(largest + at, best, mask=real)
    tl.store(totals + at, total, mask=real)
    _store_rows(partial, at, real, output, VALUE_WIDTH)


@triton.jit(do_not_specialize=["splits"])
def _join_splits(
    partial,
    largest,
    totals,
    sinks,
    output,
    splits,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The softmax of one head of one row from its splits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, MOST_SPLITS)
    value_at = tl.arange(0, PADDED_VALUE)
    at = (row * HEADS + head) * splits + split
    real = split < splits
    peaks = tl.load(largest + at, mask=real, other=float("-inf"))
    best = tl.max(peaks, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        best = tl.maximum(best, sink)
    shrink = tl.exp(peaks - best)
    total = tl.sum(tl.load(totals + at, mask=real, other=0.0) * shrink, 0)
    if SINKS:
        total += tl.exp(sink - best)
    parts = _load_rows(partial, at, real, VALUE_WIDTH, PADDED_VALUE)
    joined = tl.sum(parts * shrink[:, None], 0) / total
    tl.store(
        output + (row * HEADS + head) * VALUE_WIDTH + value_at,
        joined.to(output.dtype.element_ty),
        mask=value_at < VALUE_WIDTH,
    )


@triton.jit(do_not_specialize=["key_stride", "value_stride"])
def _store_tokens(
    keys,
    values,
    all_keys,
    all_values,
    slots,
    key_stride,
    value_stride,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write keys and values of one token, all heads, to its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    column = tl.arange(0, PADDED)
    key = tl.load(keys + row * key_stride + column, mask=column < KEYS)
    tl.store(all_keys + slot * KEYS + column, key, mask=column < KEYS)
    value = tl.load(values + row * value_stride + column, mask=column < VALUES)
    tl.store(all_values + slot * VALUES + column, value, mask=column < VALUES)


class TritonPagedAttention:
    """One layer's paged KV cache, for queries of one token each, as `cpu.PagedAttention`."""

    def __init__(
        self, keys: Tensor, values: Tensor, heads: int, options: AttentionOptions, tile: int = 0
    ) -> None:
        """Arguments are those of `cpu.PagedAttention`. `tile`: positions per iteration; 0: by the
        head's width.
        """
        self._keys, self._values, self._sinks = keys, values, options.sinks
        self._heads = heads
        self._scale = options.scale
        self._softcap = options.softcap or 0.0
        _, block_size, kv_heads, key_width = keys.shape
        group, value_width = heads // kv_heads, values.shape[3]
        padded_key = max(triton.next_power_of_2(key_width), 16)
        padded_value = max(triton.next_power_of_2(value_width), 16)
        fitting = _TILE_BYTES // (max(padded_key, padded_value) * keys.element_size())
        widths = kv_heads * key_width, kv_heads * value_width
        self._widths = {
            "KEYS": widths[0],
            "VALUES": widths[1],
            "PADDED": triton.next_power_of_2(max(widths)),
        }
        self._constants: dict[str, Any] = {
            "BLOCK_SIZE": block_size,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "KEY_WIDTH": key_width,
            "VALUE_WIDTH": value_width,
            "WINDOW": options.window or 0,
            "OWN_CHUNK": options.chunk or 0,
            # Matrix products want sides of at least 16, and all sides powers of two.
            "PADDED_GROUP": max(triton.next_power_of_2(group), 16),
            "PADDED_KEY": padded_key,
            "PADDED_VALUE": padded_value,
            "TILE": tile or min(max(fitting, 16), _TILE),
            "SOFTCAP": options.softcap is not None,
        }

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write `[tokens, kv_heads, width]` each to `slots`, `[tokens]`."""
        with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
            _store_tokens[(slots.shape[0],)](
                keys,
                values,
                self._keys,
                self._values,
                slots,
                keys.stride(0),
                values.stride(0),
                **self._widths,
            )

    def find_tensors(self) -> None:
        """Nothing to do: addresses are read at each call."""

    def decode(self, queries: Tensor, rows: DecodeRows) -> Tensor:
        """Attention of one token per row.

        Args:
            queries: `[at least rows.count, heads, key_width]`, heads of a row contiguous.
            rows: The rows.

        Returns:
            `[rows.count, heads, value_width]`.
        """
        # Triton launches on the current device, even if the tensors are on another.
        with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
            return self._decode(queries, rows)

    def _decode(self, queries: Tensor, rows: DecodeRows) -> Tensor:
        constants = self._constants
        heads, kv_heads = self._heads, constants["KV_HEADS"]
        width = constants["VALUE_WIDTH"]
        splits = count_splits(rows.count * kv_heads, rows.tables.shape[1] * constants["BLOCK_SIZE"])
        shape = (rows.count, heads, splits)
        partial = queries.new_empty((*shape, width), dtype=torch.float32)
        largest = queries.new_empty(shape, dtype=torch.float32)
        totals = torch.empty_like(largest)
        _attend_split[rows.count, kv_heads, splits](
            queries,
            self._keys,
            self._values,
            rows.tables,
            rows.contexts,
            partial,
            largest,
            totals,
            queries.stride(0),
            rows.tables.stride(0),
            splits,
            self._scale,
            self._softcap,
            **constants,
        )
        output = queries.new_empty(rows.count, heads, width)
        _join_splits[rows.count, heads](
            partial,
            largest,
            totals,
            largest if self._sinks is None else self._sinks,
            output,
            splits,
            HEADS=heads,
            VALUE_WIDTH=width,
            MOST_SPLITS=_MOST_SPLITS,
            PADDED_VALUE=constants["PADDED_VALUE"],
            SINKS=self._sinks is not None,
        )
        return output


def count_splits(programs: int, longest: int) -> int:
    """Return the number of splits per context that keeps a device busy with a small batch.

    Args:
        programs: Programs with one split each.
        longest: Positions of the longest context; a split has at least a tile.
    """
    return max(min(_PROGRAMS // programs, -(-longest // _TILE), _MOST_SPLITS), 1)
