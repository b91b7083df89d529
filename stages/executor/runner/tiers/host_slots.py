"""Host slots: memory for KV blocks outside the cache, and the copies between both."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from .....bus.control import AuditedBlock
from .....bus.messages import KVMove
from ..kv_cache import KVCache
from .transports.slots import SharedSlots


class HostSlots:
    """A plain array of bytes, one row per block, over all layers.

    `store`, `load` and `compare` are for the thread that runs the steps. Other threads write to
    a slot under `held`.

    Attributes:
        memory: `[slots, bytes of a block]`, uint8.
    """

    def __init__(
        self, cache: KVCache, memory: npt.NDArray[np.uint8], shared: SharedSlots | None = None
    ) -> None:
        """Args: the cache; `[slots, bytes of a block]`; and the same memory for other executors, if
        they may read it."""
        self.memory = memory
        self._shared = shared
        self._cache = cache
        self._device = cache.keys[0].device
        self._numbers = torch.from_numpy(memory).view(cache.keys[0].dtype)
        self._held: set[int] = set()
        self._released = threading.Condition()

    @contextmanager
    def held(self, slot: int) -> Iterator[memoryview]:
        """Write to a slot in another thread: it waits for an earlier holder, and `store` for it."""
        with self._released:
            self._released.wait_for(lambda: slot not in self._held)
            self._held.add(slot)
        self._withdraw(slot)
        try:
            yield self.memory[slot].data
        finally:
            with self._released:
                self._held.remove(slot)
                self._released.notify_all()

    def store(self, moves: Sequence[KVMove]) -> None:
        """Copy blocks of the cache to slots, none of which is named twice."""
        self._wait_for_holders({move.slot for move in moves})
        for move in moves:
            self._withdraw(move.slot)
        slots = torch.tensor([move.slot for move in moves])
        block_ids = torch.tensor([move.block_id for move in moves], device=self._device)
        for blocks, columns in self._parts():
            columns[slots] = blocks.index_select(0, block_ids).cpu()

    def offer(self, moves: Sequence[KVMove]) -> None:
        """Let other executors read slots, after copying blocks of the cache to them."""
        assert self._shared is not None, "no other executor may read these slots"
        if stored := [move for move in moves if move.block_id >= 0]:
            self.store(stored)
        for move in moves:
            self._shared.offer(move.slot, move.name)

    def load(self, moves: Sequence[KVMove]) -> None:
        """Copy slots to blocks of the cache."""
        slots = torch.tensor([move.slot for move in moves])
        block_ids = torch.tensor([move.block_id for move in moves], device=self._device)
        for blocks, columns in self._parts():
            blocks.index_copy_(0, block_ids, columns[slots].to(self._device))

    def compare(self, move: KVMove) -> AuditedBlock:
        """Return the digests of two blocks of the cache."""
        digests = []
        for block_id in (move.other, move.block_id):
            digest = xxhash.xxh3_128()
            for blocks, _ in self._parts():
                digest.update(blocks[block_id].cpu().view(torch.uint8).numpy().data)
            digests.append(digest.hexdigest())
        return AuditedBlock(move.name, *digests)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the cache, `[blocks, numbers]`, and its columns of the slots."""
        start = 0
        for layer in zip(self._cache.keys, self._cache.values, strict=True):
            for tensor in layer:
                blocks = tensor.view(tensor.shape[0], -1)
                yield blocks, self._numbers[:, start : start + blocks.shape[1]]
                start += blocks.shape[1]

    def _withdraw(self, slot: int) -> None:
        if self._shared is not None:
            self._shared.withdraw(slot)

    def _wait_for_holders(self, slots: set[int]) -> None:
        """Wait for fetches from before a reset that still write to these slots."""
        with self._released:
            self._released.wait_for(lambda: self._held.isdisjoint(slots))
