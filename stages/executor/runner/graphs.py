"""Recorded decode steps: fixed addresses and shapes, recorded once and replayed.

A step in which every row computes one token runs in the smallest bucket that holds its rows. The
rest of the bucket is padding: rows that read and write the cache's padding block. The step is one
function of the bucket's buffers: input ids (including tokens that are only on the device), model,
attention, and the choice of the next tokens. `CudaCapture` records it as a CUDA graph; called as a
function it does the same on any device, as in the tests on the CPU.

Addresses are recorded, not values: weights may change in place, and sequences and blocks come and
go. Only another DecodeHead or KVCache needs new graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from .attention.paged import PagedBackend, PagedBatch
from .batch import DecodeRows, IntArray, Uploader
from .inputs import StepInputs, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel

Step = Callable[[], tuple[Tensor, ...]]

Capture = Callable[[Step], Step]
"""Records a step. Every replay writes to the same output tensors."""


class DecodeHead(Protocol):
    """The driver's part of a recorded step: known tokens in, next tokens out, all on the device.

    Attributes:
        padding_row: The row for padding.
    """

    padding_row: int

    def resolve(self, input_ids: Tensor) -> Tensor:
        """Replace placeholders by the tokens that they stand for."""

    def choose(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the next token of each row and keep it. Returns tokens and logprobs, `[rows]`."""

    def choose_within(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor, *limits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose within limits, too, and return their logarithms."""


_COLUMNS = 10
"""Numbers per row in a bucket's buffer, besides the block table."""


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Return the batch sizes with a graph, rising. Above 8, at most a third of a bucket is padding.

    Decode is bound by reading the weights once per batch, so padding costs little.
    """
    sizes = [1, 2, 4]
    for step, stop in ((8, 32), (16, 128), (32, max_batch_size)):
        sizes += range(sizes[-1] // step * step + step, stop + 1, step)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


class DecodeStep(msgspec.Struct, frozen=True):
    """A step of rows of one token each, on the host.

    Attributes:
        input_ids: `[rows]`, placeholders included.
        positions: `[rows]`, of these tokens.
        tables: `[rows, blocks]`, the block tables.
        table_rows: `[rows]`, where the DecodeHead keeps the tokens that follow.
        sampling: As `packed_sampling` gives it.
        shift: `[rows]`, rotary positions, less `positions`.
    """

    input_ids: IntArray
    positions: IntArray
    tables: IntArray
    table_rows: IntArray
    sampling: tuple[IntArray, ...]
    shift: IntArray | int = 0


def pack_step(
    step: DecodeStep | None, size: int, width: int, cache: KVCache, padding_row: int
) -> IntArray:
    """Return a bucket's buffer: `_COLUMNS` parts of `[size]`, then block tables `[size, width]`.

    Args:
        step: At most `size` rows with tables of at most `width` blocks; None for padding alone.
        size: Rows of the bucket.
        width: Blocks of the longest sequence.
        cache: The KV cache.
        padding_row: Padding row of the DecodeHead.
    """
    buffer = np.zeros(size * (_COLUMNS + width), np.int64)
    columns, tables = buffer[: size * _COLUMNS].reshape(_COLUMNS, size), buffer[size * _COLUMNS :]
    input_ids, positions, slots, contexts, table_rows, *sampling = columns
    tables = tables.reshape(size, width)
    count = 0
    if step is not None:
        count, used = step.tables.shape
        input_ids[:count] = step.input_ids
        positions[:count] = step.positions + step.shift
        blocks = step.tables[np.arange(count), step.positions // cache.block_size]
        slots[:count] = blocks * cache.block_size + step.positions % cache.block_size
        contexts[:count] = step.positions + 1
        table_rows[:count] = step.table_rows
        for column, values in zip(sampling, step.sampling, strict=True):
            column[:count] = values
        tables[:count, :used] = step.tables
    slots[count:] = cache.padding_block * cache.block_size
    contexts[count:] = 1
    table_rows[count:] = padding_row
    tables[count:, 0] = cache.padding_block
    return buffer


class DecodeGraphs:
    """The recorded decode steps of one model.

    Attributes:
        buckets: Batch sizes, rising.
        replays: Replays of each.
        without_limits: Why a choice within limits is not recorded; "" if it is.
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
        """Record all buckets, the largest first, whose memory the smaller ones share.

        Args:
            model: The model.
            backend: Computes its attention.
            cache: Its KV cache.
            head: Supplies and keeps the tokens.
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
        # Shared by all buckets: separate ones would dominate the graphs' memory.
        shape = (max_batch_size, model.vocab_size)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=model.device)
        self._buffers: dict[int, Tensor] = {}
        self._steps: dict[int, Step] = {}
        self._choices: dict[int, Step] = {}
        self.without_limits = ""
        for size in reversed(self.buckets):
            self._buffers[size] = torch.from_numpy(self._pack(None, size)).to(model.device)
            self._steps[size] = capture(self._step(model, backend, head, size))
        try:
            for size in reversed(self.buckets):
                self._choices[size] = capture(self._choice(head, size))
        except RuntimeError as error:
            # It then runs without a graph, and without waiting all the same.
            self.without_limits = str(error)
            self._choices.clear()

    def fits(self, num_tokens: IntArray) -> bool:
        """Return whether a graph can run rows of so many tokens."""
        return len(num_tokens) <= self.buckets[-1] and bool((num_tokens == 1).all())

    def run(self, step: DecodeStep, *, within: bool = False) -> tuple[Tensor, ...]:
        """Run one step of 1 to `buckets[-1]` rows.

        Args:
            step: The step.
            within: Choose within the limits, if that is recorded.

        Returns:
            Logits `[rows, vocab]` float32, tokens `[rows]` and logprobs `[rows]` of the DecodeHead,
            and those of the limits, if within these. The next run overwrites all.
        """
        count = len(step.input_ids)
        size = next(size for size in self.buckets if size >= count)
        (packed,) = self._upload(self._pack(step, size))
        self._buffers[size].copy_(packed)
        chosen = self._steps[size]()
        if within and not self.without_limits:
            chosen = self._choices[size]()
        self.replays[size] += 1
        return self._logits[:count], *(each[:count] for each in chosen)

    def _pack(self, step: DecodeStep | None, size: int) -> IntArray:
        return pack_step(step, size, self._width, self._cache, self._padding_row)

    def _step(self, model: LoadedModel, backend: PagedBackend, head: DecodeHead, size: int) -> Step:
        """Return the step of one bucket as a function without arguments, to be recorded.

        It has no data-dependent shapes, and never waits for the device.
        """
        buffer, cache, logits_out = self._buffers[size], self._cache, self._logits[:size]
        (input_ids, positions, slots, contexts, table_rows), sampling = self._columns(size)
        temperatures, uniforms = sampling[:2]
        rows = DecodeRows(size, buffer[size * _COLUMNS :].view(size, -1), contexts)
        attention = PagedBatch(slots, rows)
        every_row = torch.arange(size, device=buffer.device)

        def step() -> tuple[Tensor, Tensor]:
            ids = head.resolve(input_ids)
            inputs = StepInputs(ids[None], positions[None], every_row, attention, backend)
            logits = logits_out.copy_(model_forward(model.module, inputs, cache))
            return head.choose(table_rows, logits, temperatures, uniforms)

        return torch.inference_mode()(step)

    def _choice(self, head: DecodeHead, size: int) -> Step:
        """Return a bucket's choice within limits, after its step, likewise."""
        (*_, table_rows), sampling = self._columns(size)
        return torch.inference_mode()(
            partial(head.choose_within, table_rows, self._logits[:size], *sampling)
        )

    def _columns(self, size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return a bucket's columns of integers, and those of float64."""
        columns = self._buffers[size][: size * _COLUMNS].view(_COLUMNS, size).unbind()
        return columns[:5], tuple(each.view(torch.float64) for each in columns[5:])


_WARM_UPS = 2


class CudaCapture:
    """Records steps as CUDA graphs that share one memory pool.

    Replay one after the other, and read the outputs of one, on the same stream, before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, step: Step) -> Step:
        """Record one step.

        Raises:
            RuntimeError: The step can't be recorded; it may wait for the device.
        """
        with torch.cuda.device(self._device), _same_stream_after():
            # First calls (compilation of Triton's kernels, workspaces of libraries) can't be
            # recorded.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.synchronize()
            if not self._graphs:
                # A pool ends with its last graph.
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = step()
            torch.cuda.synchronize()
            self._graphs.add(graph)

        return _RecordedStep(graph, outputs, step)


@dataclass(frozen=True)
class _RecordedStep:
    """A step as a CUDA graph.

    Attributes:
        graph: Reads and writes the step's tensors by address.
        outputs: Outputs of every replay.
        step: Keeps these tensors alive.
    """

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    step: Step

    def __call__(self) -> tuple[Tensor, ...]:
        self.graph.replay()
        return self.outputs


@contextmanager
def _same_stream_after() -> Iterator[None]:
    """Restore the current stream, which a failed recording changes."""
    before = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(before)
