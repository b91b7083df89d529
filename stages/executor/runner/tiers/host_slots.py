"""Host slots: memory for KV blocks or snapshots outside the cache, and the copies between both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from .....bus.control import AuditedBlock
from .....bus.steps import KVMove
from .transports.slots import SharedSlots

Units = Callable[[], Sequence[Tensor]]
"""Returns the tensors of a kind of unit, `[units, ...]` each: blocks of the cache, or snapshots."""


class HostSlots:
    """A plain array of bytes, one row per unit, over all layers.

    `store`, `load` and `compare` are for the thread that runs the steps. Other threads hold the
    slots to which they write.

    Attributes:
        memory: `[slots, unit_bytes]`, uint8.
    """

    def __init__(
        self, units: Units, memory: npt.NDArray[np.uint8], shared: SharedSlots | None = None
    ) -> None:
        """Args: tensors of the cache; `[slots, unit_bytes]`; and the same memory for other
        executors, if they may read it."""
        self.memory = memory
        self._shared = shared
        self._units = units
        # Then numpy copies: torch takes three times as long, and more while other threads run.
        self._is_host = units()[0].device.type == "cpu"
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
        """Copy units of the cache to slots, none of which is named twice."""
        slots = [move.slot for move in moves]
        block_ids = [move.block_id for move in moves]
        # Fetches from before a reset may still write to these slots.
        with self._released:
            self._released.wait_for(lambda: self._held.isdisjoint(slots))
        self._withdraw(slots)
        for units, columns in self._parts():
            if self._is_host:
                columns[slots] = _bytes(units)[block_ids]
            else:
                columns[slots] = _bytes(units[block_ids].cpu())

    def offer(self, moves: Sequence[KVMove]) -> None:
        """Let other executors read slots, after copying units of the cache to them."""
        assert self._shared is not None, "no other executor may read these slots"
        if stored := [move for move in moves if move.block_id >= 0]:
            self.store(stored)
        for move in moves:
            self._shared.offer(move.slot, move.name)

    def load(self, moves: Sequence[KVMove]) -> None:
        """Copy slots to units of the cache."""
        slots = [move.slot for move in moves]
        block_ids = [move.block_id for move in moves]
        for units, columns in self._parts():
            if self._is_host:
                _bytes(units)[block_ids] = columns[slots]
            else:
                found = torch.from_numpy(columns[slots]).view(units.dtype)
                units[block_ids] = found.to(units.device)

    def compare(self, move: KVMove) -> AuditedBlock:
        """Return the digests of two units of the cache."""
        digests = []
        for block_id in (move.other, move.block_id):
            digest = xxhash.xxh3_128()
            for units, _ in self._parts():
                digest.update(_bytes(units[block_id].cpu()).data)
            digests.append(digest.hexdigest())
        return AuditedBlock(move.name, *digests)

    def _parts(self) -> Iterator[tuple[Tensor, npt.NDArray[np.uint8]]]:
        """Each tensor of the cache, `[units, numbers]`, and its columns of the slots."""
        start = 0
        for tensor in self._units():
            units = tensor.view(tensor.shape[0], -1)
            end = start + units.shape[1] * units.itemsize
            yield units, self.memory[:, start:end]
            start = end

    def _withdraw(self, slots: Iterable[int]) -> None:
        if self._shared is not None:
            for slot in slots:
                self._shared.withdraw(slot)


def unit_bytes(units: Units) -> int:
    """Return the bytes of one unit, over all layers."""
    return sum(tensor[0].nbytes for tensor in units())


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array
