"""Host slots: memory for KV blocks outside the cache, and the copies between both."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from .....bus.control import AuditedBlock
from .....bus.steps import KVMove
from ..kv_cache import KVCache
from .transports.slots import SharedSlots


class HostSlots:
    """A plain array of bytes, one row per block, over all layers.

    `store`, `load` and `compare` are for the thread that runs the steps. Other threads hold the
    slots to which they write.

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
        # Then numpy copies: torch takes three times as long, and more while other threads run.
        self._is_host = cache.keys[0].device.type == "cpu"
        self._numbers = torch.from_numpy(memory).view(cache.keys[0].dtype)
        self._held: set[int] = set()
        self._released = threading.Condition()

    def hold(self, slots: Collection[int]) -> None:
        """Reserve slots for another thread, which writes to them: wait for earlier holders, and
        let `store` wait for the release."""
        with self._released:
            self._released.wait_for(lambda: self._held.isdisjoint(slots))
            self._held.update(slots)
        self._withdraw(slots)

    def release(self, slots: Collection[int]) -> None:
        """End a hold of slots."""
        with self._released:
            self._held.difference_update(slots)
            self._released.notify_all()

    def store(self, moves: Sequence[KVMove]) -> None:
        """Copy blocks of the cache to slots, none of which is named twice."""
        slots = [move.slot for move in moves]
        block_ids = [move.block_id for move in moves]
        # Fetches from before a reset may still write to these slots.
        with self._released:
            self._released.wait_for(lambda: self._held.isdisjoint(slots))
        self._withdraw(slots)
        for blocks, columns in self._parts():
            if self._is_host:
                _bytes(columns)[slots] = _bytes(blocks)[block_ids]
            else:
                columns[slots] = blocks[block_ids].cpu()

    def offer(self, moves: Sequence[KVMove]) -> None:
        """Let other executors read slots, after copying blocks of the cache to them."""
        assert self._shared is not None, "no other executor may read these slots"
        if stored := [move for move in moves if move.block_id >= 0]:
            self.store(stored)
        for move in moves:
            self._shared.offer(move.slot, move.name)

    def load(self, moves: Sequence[KVMove]) -> None:
        """Copy slots to blocks of the cache."""
        slots = [move.slot for move in moves]
        block_ids = [move.block_id for move in moves]
        for blocks, columns in self._parts():
            if self._is_host:
                _bytes(blocks)[block_ids] = _bytes(columns)[slots]
            else:
                blocks[block_ids] = columns[slots].to(blocks.device)

    def compare(self, move: KVMove) -> AuditedBlock:
        """Return the digests of two blocks of the cache."""
        digests = []
        for block_id in (move.other, move.block_id):
            digest = xxhash.xxh3_128()
            for blocks, _ in self._parts():
                digest.update(_bytes(blocks[block_id].cpu()).data)
            digests.append(digest.hexdigest())
        return AuditedBlock(move.name, *digests)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the cache, `[blocks, numbers]`, and its columns of the slots."""
        start = 0
        for tensor in self._cache.in_blocks:
            blocks = tensor.view(tensor.shape[0], -1)
            yield blocks, self._numbers[:, start : start + blocks.shape[1]]
            start += blocks.shape[1]

    def _withdraw(self, slots: Iterable[int]) -> None:
        if self._shared is not None:
            for slot in slots:
                self._shared.withdraw(slot)


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array
