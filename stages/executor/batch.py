"""Prepares one step's attention: which cache rows each query reads, and which it may not see.

All of it depends on the step alone, so it is made once and used by every layer. Layers differ only
in their window and their number of KV heads; each such pair gets a `BatchView`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]

ViewKey = tuple[int | None, int]
"""(window, KV heads) of a layer."""

MAX_GATHERED_TOKENS = 1 << 16
"""Most context tokens, padding included, that one decode chunk gathers."""

SHORT_CONTEXT = 512
"""Contexts of at most so many tokens are read token by token, where a kernel does it (CPU)."""

_SLACK_TOKENS = 256
"""Padding that a decode row may always have: below it another chunk costs more than it saves."""


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Rows of one token each, of similar context length, computed together.

    Attributes:
        start: First token of the chunk in the batch.
        stop: One past its last.
        index: `[rows * kv_heads * length]`, rows of the flat cache `[slots * kv_heads, dim]`,
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
class PrefillRow:
    """Several tokens of one sequence.

    Attributes:
        start: First token of the row in the batch.
        stop: One past its last.
        index: `[kv_heads * context]` as in DecodeChunk; None when nothing precedes the row, whose
            own keys and values are then all there is.
        mask: `[tokens, context]`, true where a query may look; None is causal.
    """

    start: int
    stop: int
    index: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one token each, for a kernel that reads the cache by itself.

    Attributes:
        count: How many there are, in front of the batch.
        tables: `[at least count, blocks]` int64, contiguous.
        contexts: `[at least count]` int64. Best falling: then the longest are begun first.
    """

    count: int
    tables: Tensor
    contexts: Tensor


@dataclass(frozen=True, slots=True)
class BatchView:
    """The batch as the layers of one window and head count see it.

    Where the AttentionBatch has `decode_rows`, there are no `decodes` here.
    """

    decodes: tuple[DecodeChunk, ...]
    prefills: tuple[PrefillRow, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention must know of one step.

    Attributes:
        slots: `[tokens]`, where each token's key and value go: block * block_size + offset.
        views: One per kind of layer.
        decode_rows: What the kernel for decoding takes; None where there is no such kernel.
    """

    slots: Tensor
    views: dict[ViewKey, BatchView]
    decode_rows: DecodeRows | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, in batch order: first those of one token, longest context first.

    Attributes:
        starts: `[rows]`, position of each row's first token.
        num_tokens: `[rows]`.
        tables: `[rows, blocks]`, block numbers; what a row does not need is any valid block.
        num_decodes: How many rows, in front, have one token.
    """

    starts: IntArray
    num_tokens: IntArray
    tables: IntArray
    num_decodes: int

    @property
    def contexts(self) -> IntArray:
        """`[rows]`, tokens that each row's last query sees when nothing is masked."""
        return self.starts + self.num_tokens


class Uploader:
    """Brings host arrays to the device: on CPU without copying, on CUDA in one pinned transfer.

    The transfer runs beside the step before, on a stream of its own. Pinned memory comes from
    torch's allocator, which gives it out again once the transfer has left it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, *arrays: IntArray) -> tuple[Tensor, ...]:
        if self._stream is None:
            return tuple(map(torch.from_numpy, arrays))
        total = sum(array.size for array in arrays)
        staged = torch.empty(total, dtype=torch.int64, pin_memory=True)
        np.concatenate([array.reshape(-1) for array in arrays], out=staged.numpy())
        with torch.cuda.stream(self._stream):
            on_device = staged.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        on_device.record_stream(current)
        parts = torch.split(on_device, [array.size for array in arrays])
        return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


def order_rows(starts: IntArray, num_tokens: IntArray) -> tuple[IntArray, int]:
    """The batch order of the rows, `[rows]` indices, and the number of rows of one token."""
    is_decode = num_tokens == 1
    key = np.where(is_decode, -starts, np.iinfo(np.int64).max)
    return np.argsort(key, kind="stable"), int(is_decode.sum())


def flatten_rows(starts: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
    """For each token of the batch its row and its position in the sequence, `[tokens]` each."""
    row_of_token = np.repeat(np.arange(starts.size), num_tokens)
    first_token = np.cumsum(num_tokens) - num_tokens
    positions = np.arange(row_of_token.size) + (starts - first_token)[row_of_token]
    return row_of_token, positions


def slot_mapping(
    tables: IntArray, row_of_token: IntArray, positions: IntArray, block_size: int
) -> IntArray:
    """Where each token's key and value go, `[tokens]`."""
    blocks = tables[row_of_token, positions // block_size]
    return blocks * block_size + positions % block_size


def build_attention_batch(
    rows: Rows,
    slots: Tensor,
    tables: Tensor,
    contexts: Tensor,
    *,
    block_size: int,
    kinds: Iterable[ViewKey],
    dtype: torch.dtype,
    paged: bool = False,
) -> AttentionBatch:
    """Prepares a step for all kinds of layers.

    Args:
        rows: The rows, on the host.
        slots: `[tokens]`, the slot mapping on the device.
        tables: `rows.tables` on the device.
        contexts: `rows.contexts` on the device.
        block_size: Tokens per block.
        kinds: The kinds of layers.
        dtype: The model's.
        paged: Whether a kernel reads the cache for the rows of one token.
    """
    decode_rows = _paged_rows(rows, tables, contexts) if paged else None
    prefills_apart = decode_rows is None or decode_rows.count == rows.num_decodes
    longest = int(rows.contexts.max(initial=0))
    views: dict[ViewKey, BatchView] = {}
    for window, heads in kinds:
        # A window that no row has outgrown is no window.
        effective = window if window is not None and window < longest else None
        shared = views.get((effective, heads))
        if shared is None:
            decodes: Iterable[DecodeChunk] = ()
            if not paged:
                decodes = _decode_chunks(
                    rows, tables, contexts, effective, heads, block_size, dtype
                )
            prefills: Iterable[PrefillRow] = ()
            if prefills_apart:
                prefills = _prefill_rows(rows, tables, effective, heads, block_size)
            shared = BatchView(tuple(decodes), tuple(prefills))
            views[effective, heads] = shared
        views[window, heads] = shared
    return AttentionBatch(slots, views, decode_rows)


def _paged_rows(rows: Rows, tables: Tensor, contexts: Tensor) -> DecodeRows:
    """The rows of one token; on CPU all tokens of short contexts, as rows of one token each.

    A matrix product for so few keys costs more than it saves.
    """
    longest = int(rows.contexts.max(initial=0))
    all_decode = rows.num_decodes == rows.starts.size
    if all_decode or tables.device.type != "cpu" or longest > SHORT_CONTEXT:
        return DecodeRows(rows.num_decodes, tables, contexts)
    row_of_token, positions = flatten_rows(rows.starts, rows.num_tokens)
    return DecodeRows(
        len(positions),
        tables.index_select(0, torch.from_numpy(row_of_token)),
        torch.from_numpy(positions + 1),
    )


def _decode_chunks(
    rows: Rows,
    tables: Tensor,
    contexts: Tensor,
    window: int | None,
    heads: int,
    block_size: int,
    dtype: torch.dtype,
) -> Iterator[DecodeChunk]:
    if not rows.num_decodes:
        return
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
        bias = torch.zeros(hidden.shape, dtype=dtype, device=tables.device)
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


def _prefill_rows(
    rows: Rows, tables: Tensor, window: int | None, heads: int, block_size: int
) -> Iterator[PrefillRow]:
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
