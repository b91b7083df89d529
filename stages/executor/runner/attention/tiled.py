"""Attention whose result for a token does not depend on the batch, bit for bit (CPU).

Every query is computed by one algorithm of fixed shapes, alone or as part of a long prompt. The
context is cut into blocks of `BLOCK` positions at absolute multiples, independent of the cache's
blocks. The queries of a token that share a KV head are rows of a tile; a tile has `tile_rows`
rows, of one or several tokens of a sequence. The scores of a tile and a block are one product of
that shape, the block's weighted values another. The maximum is exact in any order; sums and outputs
of the blocks are added in the order of the blocks, from zero. A masked block
adds zeros, so blocks of a neighbour's longer context don't matter.

All in float32, also for bfloat16 models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from .....config import ModelError
from ..attention_options import AttentionOptions, Span
from ..batch import IntArray, Rows
from ..fixed_tiles import elementwise
from ..kv_cache import KVCache
from .backend import QKV
from .gather import cut_chunks

BLOCK = 64
"""Positions whose keys and values are multiplied together."""

_MIN_ROWS = 16
"""Rows of a tile, unless one token has more."""

_MAX_SCORES = 1 << 22
"""Scores in memory for the tiles of one sequence and one KV head (float32: 16 MiB)."""


class TileChunk(msgspec.Struct, frozen=True):
    """Tiles that are computed together: of one sequence, or of several with one tile each.

    Attributes:
        tokens: `[tiles, tile_tokens]`, tokens of the batch; padding repeats the first.
        used: `[used]`, valid places of the flattened `tokens`.
        index: `[blocks, sequences, kv_heads, BLOCK]`, flattened, for `KVCache.gather`.
        num_blocks: Blocks per sequence, padding included.
        shared: All tiles are of one sequence, that of `index`.
        masks: Per block `[tiles, 1, tile_rows, BLOCK]`, true where a row must not attend; None if
            all may.
    """

    tokens: Tensor
    used: Tensor
    index: Tensor
    num_blocks: int
    shared: bool
    masks: tuple[Tensor | None, ...]


class TiledBatch(msgspec.Struct, frozen=True):
    """A step. Tiles are cut at the first layer of each kind.

    Attributes:
        slots: `[tokens]`, the slot mapping.
        rows: The step.
        block_size: Tokens per block of the cache.
        chunks: By span, KV heads and query heads per KV head; the layers of a kind share them.
    """

    slots: Tensor
    rows: Rows
    block_size: int
    chunks: dict[tuple[Span, int, int], tuple[TileChunk, ...]] = {}

    def chunks_of(self, span: Span, heads: int, group: int) -> tuple[TileChunk, ...]:
        """The tiles for layers of this kind."""
        key = (span, heads, group)
        if key not in self.chunks:
            self.chunks[key] = tuple(_Cutter(self.rows, self.block_size, *key).chunks())
        return self.chunks[key]


def tile_shape(group: int) -> tuple[int, int]:
    """Return rows and tokens of a tile; `group` query heads share a KV head."""
    rows = -(-group // _MIN_ROWS) * _MIN_ROWS
    return rows, rows // group if rows == _MIN_ROWS else 1


@dataclass
class _Cutter:
    """Cuts one step into tiles for layers of one kind."""

    rows: Rows
    block_size: int
    span: Span
    heads: int
    group: int

    def __post_init__(self) -> None:
        self._tile_rows, self._tile_tokens = tile_shape(self.group)

    def chunks(self) -> Iterator[TileChunk]:
        rows = self.rows
        first_token = np.cumsum(rows.num_tokens) - rows.num_tokens
        single = np.flatnonzero(rows.num_tokens <= self._tile_tokens)
        num_blocks = (rows.contexts - 1) // BLOCK - self._first_block(rows.starts) + 1
        single = single[np.argsort(-num_blocks[single], kind="stable")]
        for start, stop in cut_chunks(num_blocks[single] * BLOCK):
            chosen = single[start:stop]
            counts = rows.num_tokens[chosen]
            yield self._chunk(chosen, first_token[chosen], rows.starts[chosen], counts, False)
        for row in np.flatnonzero(rows.num_tokens > self._tile_tokens):
            yield from self._long_row(row, int(first_token[row]))

    def _long_row(self, row: np.int64, first_token: int) -> Iterator[TileChunk]:
        """Cut a sequence of several tiles, as many at a time as memory allows."""
        start, count = int(self.rows.starts[row]), int(self.rows.num_tokens[row])
        done = 0
        while done < count:
            context = start + done + self._tile_tokens
            tiles = max(_MAX_SCORES // (self._tile_rows * context), 1)
            tiles = min(tiles, 64, -(-(count - done) // self._tile_tokens))
            offsets = done + np.arange(tiles) * self._tile_tokens
            counts = np.minimum(count - offsets, self._tile_tokens)
            table = np.full(tiles, row)
            yield self._chunk(table, first_token + offsets, start + offsets, counts, True)
            done += int(counts.sum())

    def _chunk(
        self, rows: IntArray, tokens: IntArray, starts: IntArray, counts: IntArray, shared: bool
    ) -> TileChunk:
        """Make a chunk of one tile for each entry of `rows`.

        Args:
            rows: `[tiles]`, the row whose block table to use.
            tokens: `[tiles]`, first token in the batch.
            starts: `[tiles]`, its position in the sequence.
            counts: `[tiles]`, tokens.
            shared: All are of the same row.
        """
        places = np.arange(self._tile_tokens)
        valid = places < counts[:, None]
        offsets = np.where(valid, places, 0)
        batch_tokens = tokens[:, None] + offsets
        positions = starts[:, None] + offsets
        own = self.rows.reach_of(self.span.window)
        reach = positions if own is None else own[batch_tokens]
        first = self._first_block(starts)
        if shared:
            first = first[:1]
        num_blocks = int((reach.max(1) // BLOCK - first).max()) + 1
        blocks = first + np.arange(num_blocks)[:, None]
        keys = blocks[:, :, None] * BLOCK + np.arange(BLOCK)
        return TileChunk(
            tokens=torch.from_numpy(batch_tokens),
            used=torch.from_numpy(np.flatnonzero(valid)),
            index=self._index(rows[: len(first)], keys),
            num_blocks=num_blocks,
            shared=shared,
            masks=tuple(self._mask(positions, reach, block) for block in keys),
        )

    def _index(self, rows: IntArray, keys: IntArray) -> Tensor:
        """Return rows of the flat cache for positions `[blocks, sequences, BLOCK]`."""
        tables = self.rows.tables
        # Positions past the table are masked; any block will do.
        columns = np.minimum(keys // self.block_size, tables.shape[1] - 1)
        slots = tables[rows[:, None], columns] * self.block_size + keys % self.block_size
        index = slots[:, :, None] * self.heads + np.arange(self.heads)[:, None]
        return torch.from_numpy(index.reshape(-1))

    def _mask(self, positions: IntArray, reach: IntArray, keys: IntArray) -> Tensor | None:
        """Return the mask of keys `[1 or tiles, BLOCK]` for queries `[tiles, tile_tokens]`, which
        see up to `reach`."""
        hidden = keys[:, None] > reach[:, :, None]
        if self.span != Span():
            hidden |= keys[:, None] < self.span.first(positions)[:, :, None]
        if not hidden.any():
            return None
        # One row for each query head; padding rows use the first token's mask.
        mask = np.repeat(hidden, self.group, axis=1)
        rest = self._tile_rows - mask.shape[1]
        mask = np.concatenate((mask, np.repeat(mask[:, :1], rest, axis=1)), axis=1)
        return torch.from_numpy(mask[:, None])

    def _first_block(self, positions: IntArray) -> IntArray:
        """Return the block of the first visible position."""
        return self.span.first(positions) // BLOCK


def multiply_heads(rows: Tensor, matrices: Tensor, out: Tensor) -> None:
    """As `AttentionBackend.multiply_heads`, `_MIN_ROWS` tokens at a time."""
    with torch._C.DisableTorchFunction():
        for some, target in zip(
            torch.split(rows, _MIN_ROWS), torch.split(out, _MIN_ROWS), strict=True
        ):
            padded = rows.new_zeros(rows.shape[1], _MIN_ROWS, rows.shape[2])
            padded[:, : len(some)] = some.transpose(0, 1)
            target.copy_(torch.bmm(padded, matrices)[:, : len(some)].transpose(0, 1))


class TiledBackend:
    """An AttentionBackend for deterministic mode."""

    name: ClassVar[str] = "tiled"
    multiply_heads = staticmethod(multiply_heads)

    def __init__(self, block_size: int) -> None:
        """`block_size`: of the cache."""
        self._block_size = block_size

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> TiledBatch:
        return TiledBatch(slots, rows, self._block_size)

    def forward(
        self, batch: TiledBatch, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        queries, keys, values = qkv
        tokens, num_heads, _ = queries.shape
        heads = keys.shape[1]
        group = num_heads // heads
        cache.store(layer, keys, values, batch.slots)
        output = queries.new_empty(tokens, num_heads, values.shape[-1])
        scaled = queries.float() * options.scale
        sink_rows = None if options.sinks is None else _sink_rows(options.sinks, heads, group)
        # Shapes are fixed here, so the function mode is not needed.
        with torch._C.DisableTorchFunction():
            for chunk in batch.chunks_of(options.span, heads, group):
                tiles = _pack(scaled[chunk.tokens], heads, group)
                context = cache.gather(layer, chunk.index)
                result = _chunk_attention(chunk, tiles, *context, options.softcap, sink_rows)
                rows = _unpack(result, chunk.tokens.shape[1], group)
                target = chunk.tokens.view(-1)[chunk.used]
                output.index_copy_(0, target, rows[chunk.used].to(output.dtype))
        return output


def _pack(queries: Tensor, heads: int, group: int) -> Tensor:
    """`[tiles, tile_tokens, query_heads, dim]` to `[tiles, kv_heads, tile_rows, dim]`."""
    tiles, tokens, _, dim = queries.shape
    packed = queries.new_zeros(tiles, heads, tile_shape(group)[0], dim)
    grouped = queries.view(tiles, tokens, heads, group, dim).transpose(1, 2)
    packed[:, :, : tokens * group].view(tiles, heads, tokens, group, dim).copy_(grouped)
    return packed


def _unpack(result: Tensor, tokens: int, group: int) -> Tensor:
    """`[tiles, kv_heads, tile_rows, dim]` to `[tiles * tile_tokens, query_heads, dim]`."""
    tiles, heads, _, dim = result.shape
    grouped = result[:, :, : tokens * group].view(tiles, heads, tokens, group, dim)
    return grouped.transpose(1, 2).reshape(tiles * tokens, heads * group, dim)


def _sink_rows(sinks: Tensor, heads: int, group: int) -> Tensor:
    """`[kv_heads, tile_rows]` in float32; padding rows have the first head's."""
    rows, tokens = tile_shape(group)
    by_head = sinks.float().view(heads, group).repeat(1, tokens)
    rest = by_head[:, :1].expand(-1, rows - by_head.shape[1])
    return torch.cat((by_head, rest), dim=1)


def _chunk_attention(
    chunk: TileChunk,
    tiles: Tensor,
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`[tiles, kv_heads, tile_rows, value_dim]`; keys and values as gathered."""
    count, heads, rows, _ = tiles.shape
    shape = (chunk.num_blocks, -1, BLOCK)
    key_blocks = keys.float().view(*shape, keys.shape[-1])
    value_blocks = values.float().view(*shape, values.shape[-1])
    if not chunk.shared:
        if sinks is not None:
            sinks = sinks.expand(count, -1, -1).reshape(-1, rows)
        flat = tiles.view(count * heads, rows, -1)
        result = _attend(flat, key_blocks, value_blocks, chunk.masks, softcap, sinks)
        return result.view(count, heads, rows, -1)
    # The tiles of a sequence share keys: one head at a time, so that they aren't copied.
    results = []
    for head in range(heads):
        head_keys = key_blocks[:, head, None].expand(-1, count, -1, -1)
        head_values = value_blocks[:, head, None].expand(-1, count, -1, -1)
        head_sinks = None if sinks is None else sinks[head].expand(count, -1)
        tile = tiles[:, head].contiguous()
        results.append(_attend(tile, head_keys, head_values, chunk.masks, softcap, head_sinks))
    return torch.stack(results, dim=1)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    masks: Sequence[Tensor | None],
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The algorithm for each of n tiles.

    Args:
        queries: `[n, rows, key_dim]`, scaled.
        keys: `[blocks, n, BLOCK, key_dim]`.
        values: `[blocks, n, BLOCK, value_dim]`.
        masks: One per block, as in TileChunk; n is tiles, or tiles times KV heads.
        softcap: As in AttentionOptions.
        sinks: `[n, rows]`.

    Returns:
        `[n, rows, value_dim]`.
    """
    count, rows, _ = queries.shape
    scores = queries.new_empty(len(masks), count, rows, BLOCK)
    for block, block_keys in zip(scores, keys, strict=True):
        torch.bmm(queries, block_keys.transpose(1, 2), out=block)
    if softcap is not None:
        scores = elementwise(torch.tanh, scores.div_(softcap)).mul_(softcap)
    for block, mask in zip(scores, masks, strict=True):
        if mask is not None:
            block.view(len(mask), -1, rows, BLOCK).masked_fill_(mask, float("-inf"))
    largest = scores.amax(dim=-1).amax(dim=0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = elementwise(torch.exp, scores.sub_(largest[:, :, None]))
    sums = weights.sum(dim=-1)
    total = torch.zeros_like(largest)
    output = queries.new_zeros(count, rows, values.shape[-1])
    product = torch.empty_like(output)
    for block, block_values, block_sum in zip(weights, values, sums, strict=True):
        total += block_sum
        output += torch.bmm(block, block_values, out=product)
    if sinks is not None:
        total += elementwise(torch.exp, sinks - largest)
    return output.div_(total[:, :, None])


def check_attention(group: int, key_dim: int, value_dim: int) -> None:
    """Raises ModelError if results depend on the number of tiles, or on a row's place."""
    rows, _ = tile_shape(group)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(37, rows, key_dim, generator=generator)
    keys = torch.randn(2, 37, BLOCK, key_dim, generator=generator)
    values = torch.randn(2, 37, BLOCK, value_dim, generator=generator)
    attend = partial(_attend, masks=(None, None), softcap=None, sinks=None)
    wanted = attend(queries, keys, values)
    order = torch.randperm(rows, generator=generator)
    same = torch.equal(attend(queries[:, order], keys, values), wanted[:, order])
    for count in (1, 2, 5, 16):
        part = slice(7, 7 + count)
        same &= torch.equal(attend(queries[part], keys[:, part], values[:, part]), wanted[part])
        one = (tensor[:, :1].expand(-1, count, -1, -1) for tensor in (keys, values))
        same &= torch.equal(attend(queries[:count], *one)[:1], wanted[:1])
    if not same:
        raise ModelError(
            "deterministic mode is impossible here: batched matrix products of "
            f"{rows} x {key_dim} x {BLOCK} depend on their number; set deterministic to false"
        )
