"""Decode steps with fixed addresses and shapes, which a device can record once and then replay.

A step in which every row computes one token runs in the smallest bucket that holds its rows. The
rest of the bucket is padding: rows that read and write the cache's padding block. The whole step is
one function of the bucket's buffers: input ids (with tokens that are only on the device), model,
attention, and the choice of the next tokens. `cuda_graphs.CudaCapture` makes a CUDA graph of it; as
a function that is called it does the same on any device, which is how the tests run it on CPU.

Recorded are addresses and not numbers. So weights may change in place, and sequences and blocks
come and go; only another DecodeHead or KVCache makes other graphs necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .attention.paged import PagedBackend, PagedBatch
from .batch import DecodeRows, IntArray, Uploader
from .inputs import StepInputs, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel

Step = Callable[[], tuple[Tensor, Tensor]]

Capture = Callable[[Step], Step]
"""Records a step, whose outputs are the same tensors each time that it is replayed."""


class DecodeHead(Protocol):
    """The driver's part of a recorded step: known tokens in, next tokens out, all on the device."""

    @property
    def padding_row(self) -> int:
        """The row for padding."""

    def resolve(self, input_ids: Tensor) -> Tensor:
        """Replace placeholders by the tokens that they stand for."""

    def choose(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the next token of each row and keep it. Returns tokens and logprobs, `[rows]`."""


_COLUMNS = 7
"""Numbers per row in a bucket's buffer, besides the block table."""


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, rising. Above 8 at most a third of a bucket is padding.

    Decode is bound by reading the weights, once for the whole batch, so padding costs little.
    """
    sizes = [1, 2, 4]
    for step, stop in ((8, 32), (16, 128), (32, max_batch_size)):
        sizes += range(sizes[-1] // step * step + step, stop + 1, step)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of rows of one token each, on the host.

    Attributes:
        input_ids: `[rows]`, placeholders included.
        positions: `[rows]`, of these tokens.
        tables: `[rows, blocks]`, with every block that a row needs.
        table_rows: `[rows]`, where the DecodeHead keeps the tokens that follow.
        sampling: Temperatures and uniform numbers, `[rows]` each, as `packed_sampling` gives them.
    """

    input_ids: IntArray
    positions: IntArray
    tables: IntArray
    table_rows: IntArray
    sampling: tuple[IntArray, IntArray]


def pack_step(
    step: DecodeStep | None, size: int, width: int, cache: KVCache, padding_row: int
) -> IntArray:
    """A bucket's buffer: `_COLUMNS` parts of `[size]`, then the block tables, `[size, width]`.

    Args:
        step: At most `size` rows with tables of at most `width` blocks; None for padding alone.
        size: Of the bucket.
        width: Blocks that the longest sequence can have.
        cache: Says which block is padding, and how long blocks are.
        padding_row: Of the DecodeHead.
    """
    buffer = np.zeros(size * (_COLUMNS + width), np.int64)
    columns, tables = buffer[: size * _COLUMNS].reshape(_COLUMNS, size), buffer[size * _COLUMNS :]
    input_ids, positions, slots, contexts, table_rows, temperatures, uniforms = columns
    tables = tables.reshape(size, width)
    count = 0
    if step is not None:
        count, used = step.tables.shape
        input_ids[:count] = step.input_ids
        positions[:count] = step.positions
        blocks = step.tables[np.arange(count), step.positions // cache.block_size]
        slots[:count] = blocks * cache.block_size + step.positions % cache.block_size
        contexts[:count] = step.positions + 1
        table_rows[:count] = step.table_rows
        temperatures[:count], uniforms[:count] = step.sampling
        tables[:count, :used] = step.tables
    slots[count:] = cache.padding_block * cache.block_size
    contexts[count:] = 1
    table_rows[count:] = padding_row
    tables[count:, 0] = cache.padding_block
    return buffer


class DecodeGraphs:
    """The recorded decode steps of one lane.

    Attributes:
        buckets: Batch sizes, rising.
        replays: How often each was used.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: PagedBackend,
        cache: KVCache,
        head: DecodeHead,
        capture: Capture,
        max_batch_size: int,
    ) -> None:
        """Records all buckets, the largest first, so that the smaller ones share its memory.

        Args:
            model: What to run.
            backend: Computes its attention.
            cache: Its KV cache.
            head: Gives and takes the tokens.
            capture: Records a step.
            max_batch_size: The largest bucket.

        Raises:
            RuntimeError: The device can't record this model's step.
        """
        self.buckets = batch_buckets(max_batch_size)
        self.replays = dict.fromkeys(self.buckets, 0)
        self._cache = cache
        self._width = -(-model.max_model_len // cache.block_size)
        self._padding_row = head.padding_row
        self._upload = Uploader(model.device)
        # One for all buckets: each of its own would be most of what graphs take of the memory.
        shape = (max_batch_size, model.vocab_size)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=model.device)
        self._buffers: dict[int, Tensor] = {}
        self._steps: dict[int, Step] = {}
        for size in reversed(self.buckets):
            self._buffers[size] = torch.from_numpy(self._pack(None, size)).to(model.device)
            self._steps[size] = capture(self._step(model, backend, head, size))

    def fits(self, num_tokens: IntArray) -> bool:
        """Whether rows that compute so many tokens are a step for a graph."""
        return len(num_tokens) <= self.buckets[-1] and bool((num_tokens == 1).all())

    def run(self, step: DecodeStep) -> tuple[Tensor, Tensor, Tensor]:
        """Runs one step of 1 to `buckets[-1]` rows.

        Returns:
            Logits `[rows, vocab]` float32, tokens `[rows]` and logprobs `[rows]` as `sample_plain`
            gives them. The next run overwrites all three.
        """
        count = len(step.input_ids)
        size = next(size for size in self.buckets if size >= count)
        (packed,) = self._upload(self._pack(step, size))
        self._buffers[size].copy_(packed)
        tokens, logprobs = self._steps[size]()
        self.replays[size] += 1
        return self._logits[:count], tokens[:count], logprobs[:count]

    def _pack(self, step: DecodeStep | None, size: int) -> IntArray:
        return pack_step(step, size, self._width, self._cache, self._padding_row)

    def _step(self, model: LoadedModel, backend: PagedBackend, head: DecodeHead, size: int) -> Step:
        """The step of one bucket as a function without arguments, to be recorded.

        It has no shape that depends on data, and never waits for the device.
        """
        buffer, cache, logits_out = self._buffers[size], self._cache, self._logits[:size]
        columns = buffer[: size * _COLUMNS].view(_COLUMNS, size)
        input_ids, positions, slots, contexts, table_rows, *packed = columns.unbind()
        temperatures, uniforms = (column.view(torch.float64) for column in packed)
        rows = DecodeRows(size, buffer[size * _COLUMNS :].view(size, -1), contexts)
        attention = PagedBatch(slots, rows)
        every_row = torch.arange(size, device=buffer.device)

        def step() -> tuple[Tensor, Tensor]:
            ids = head.resolve(input_ids)
            inputs = StepInputs(ids[None], positions[None], every_row, attention, backend)
            logits = logits_out.copy_(model_forward(model.module, inputs, cache))
            return head.choose(table_rows, logits, temperatures, uniforms)

        return torch.inference_mode()(step)
