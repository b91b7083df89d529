"""The batch of a step: its rows, flattened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows of a step, in batch order: rows of one token first, longest context first.

    Attributes:
        starts: `[rows]`, position of each row's first token.
        num_tokens: `[rows]`.
        tables: `[rows, blocks]`, block numbers; unneeded entries are any valid block.
        num_decodes: The number of rows of one token.
        read: Indices, rising, of tokens whose last hidden states are read; None for all.
        reach: `[tokens]`, the last position that each token sees, in its own sequence and within
            its row; None if it is always the token's own.
        reach_in_windows: Whether only layers with a sliding window have `reach`.
        states: `[rows]`, state slots; None for a model without recurrent state.
        saves: `[saves, 3]`, states to copy: a row, the tokens of it that are in the state, and the
            slot of the copy; None for none.
    """

    starts: IntArray
    num_tokens: IntArray
    tables: IntArray
    num_decodes: int
    read: IntArray | None = None
    reach: IntArray | None = None
    reach_in_windows: bool = False
    states: IntArray | None = None
    saves: IntArray | None = None

    @cached_property
    def contexts(self) -> IntArray:
        """`[rows]`, tokens that each row's last query sees without a window."""
        return self.starts + self.num_tokens

    @cached_property
    def flat(self) -> tuple[IntArray, IntArray]:
        """Row and position in the sequence of each token, `[tokens]` each."""
        return flatten_rows(self.starts, self.num_tokens)

    def reach_of(self, window: int | None) -> IntArray | None:
        """Return `reach` in layers with a sliding window, or with None."""
        return None if self.reach_in_windows and window is None else self.reach

    def slots(self, block_size: int) -> IntArray:
        """Return the slot mapping, `[tokens]`: each token's place in the KV cache."""
        row_of_token, positions = self.flat
        blocks = self.tables[row_of_token, positions // block_size]
        return blocks * block_size + positions % block_size


class DecodeRows(msgspec.Struct, frozen=True):
    """The rows of one token each, for a kernel that reads the cache by itself.

    Attributes:
        count: Their number, at the front of the batch.
        tables: `[at least count, blocks]` int64, contiguous.
        contexts: `[at least count]` int64, best falling, so that the longest start first.
    """

    count: int
    tables: Tensor
    contexts: Tensor


class Uploader:
    """Copies host arrays to the device: in one pinned transfer on CUDA, without a copy on the CPU.

    On CUDA the transfer overlaps the previous step, on its own stream. Torch's allocator reuses
    pinned memory once the transfer is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, *arrays: IntArray) -> tuple[Tensor, ...]:
        if self._stream is None:
            here = map(torch.from_numpy, arrays)
            on_cpu = self._device.type == "cpu"
            return tuple(here if on_cpu else (tensor.to(self._device) for tensor in here))
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
    """Return the batch order, `[rows]` indices, and the number of rows of one token."""
    is_decode = num_tokens == 1
    key = np.where(is_decode, -starts, np.iinfo(np.int64).max)
    return np.argsort(key, kind="stable"), int(is_decode.sum())


def flatten_rows(starts: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row and the position in the sequence of each token, `[tokens]` each."""
    row_of_token = np.repeat(np.arange(starts.size), num_tokens)
    first_token = np.cumsum(num_tokens) - num_tokens
    positions = np.arange(row_of_token.size) + (starts - first_token)[row_of_token]
    return row_of_token, positions


class StepOutput:
    """The output of one forward pass.

    Attributes:
        logits: `[samples, vocab]` float32, as of `model_forward`.
        states: The last hidden states of all tokens, `[tokens, hidden]`; None if not wanted.
        experts: The tokens' routed experts; None if not wanted.
    """

    experts: Any = None

    def __init__(self, logits: Tensor, states: Tensor | None) -> None:
        self.logits, self.states = logits, states

    def wait(self) -> None:
        """Block until the tensors hold the output."""
