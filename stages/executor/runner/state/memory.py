"""The memory of all layers' states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch import IntArray, Uploader
from ..system_memory import zeros
from .kinds import LayerState, StateTensor


class StateMemory:
    """States in blocks of tokens, and in slots of one sequence each.

    The tensor objects stay the same; their memory may be released and allocated again.

    Attributes:
        num_blocks: Blocks of each tensor that is kept per token.
        block_size: Tokens of a block.
        num_slots: Sequences of each tensor that is kept per sequence.
        num_snapshots: Copies of such states; their slots follow those of sequences.
        layers: The tensors of each kind in order: `[num_blocks + 1, block_size, *shape]` or
            `[num_slots + num_snapshots, *shape]`. The last block is for rows that only pad a batch.
        in_blocks: States kept per token, layer by layer.
        in_slots: States kept per sequence, layer by layer.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        num_snapshots: int = 0,
        huge_pages: bool = False,
    ) -> None:
        """Allocate the tensors. `huge_pages`: in large pages, if available."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_slots, self.num_snapshots = num_slots, num_snapshots

        # Zeros, not empty: masked positions are multiplied by zero, and 0 * NaN would be NaN.
        def allocate(tensor: StateTensor) -> Tensor:
            first = (
                (num_blocks + 1, block_size) if tensor.per_token else (num_slots + num_snapshots,)
            )
            return zeros((*first, *tensor.shape), tensor.dtype, device, huge=huge_pages)

        self.layers: list[list[Tensor]] = []
        self.in_blocks: list[Tensor] = []
        self.in_slots: list[Tensor] = []
        for state in states:
            self.layers.append([])
            for described in state.tensors(dtype):
                tensor = allocate(described)
                self.layers[-1].append(tensor)
                (self.in_blocks if described.per_token else self.in_slots).append(tensor)
        self._upload = Uploader(device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return self.in_blocks + self.in_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as if none were released."""
        return sum(each.nbytes for each in self.tensors)

    def clear(self) -> None:
        """Set all numbers to zero."""
        for tensor in self.tensors:
            tensor.zero_()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination) each, in all layers; sources are read first.

        Raises:
            ValueError: A block number is out of range.
        """
        self._copy("blocks", self.in_blocks, self.num_blocks, pairs)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots likewise, as when sequences share a prompt.

        Raises:
            ValueError: A slot is out of range.
        """
        count = self.num_slots + self.num_snapshots
        if {source for source, _ in pairs} & {destination for _, destination in pairs}:
            self._copy("slots", self.in_slots, count, pairs)
            return
        _check("slots", count, pairs)
        # Slots are large: without memory in between, which the system would clear for each call.
        for tensor in self.in_slots:
            for source, destination in pairs:
                tensor[destination].copy_(tensor[source])

    def drop(self, slot: int) -> None:
        """Set a slot to zero, in which a new sequence begins."""
        for tensor in self.in_slots:
            tensor[slot].zero_()

    def _copy(
        self, what: str, tensors: list[Tensor], count: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        if not pairs:
            return
        _check(what, count, pairs)
        wanted: IntArray = np.array(pairs, np.int64)
        source, destination = self._upload(wanted)[0].unbind(1)
        for tensor in tensors:
            if tensor.itemsize == 1:  # torch can't index all dtypes of a byte
                tensor = tensor.view(torch.uint8)
            tensor.index_copy_(0, destination, tensor.index_select(0, source))


def _check(what: str, count: int, pairs: Sequence[tuple[int, int]]) -> None:
    if not all(0 <= place < count for pair in pairs for place in pair):
        raise ValueError(f"{what} to copy are out of range 0..{count - 1}: {pairs}")
