"""Fetches: blocks that come to host slots in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .....bus.control import TiersChanged
from .....bus.messages import KVMove
from .changes import TierChanges
from .host_slots import HostSlots

Source = Callable[[bytes, memoryview], bool]
"""Writes the block of a name to memory, from any thread. Returns whether the block is whole: then
all bytes are written and checked. If not, the bytes mean nothing."""


class Fetches:
    """Threads that write blocks from a source to host slots.

    Each fetch is reported as fetched or lost, unless the tiers were reset meanwhile. A fetch that
    is running at a reset still writes to its slot: whoever uses the slot next waits for that.
    """

    def __init__(
        self, slots: HostSlots, changes: TierChanges, source: Source, num_threads: int, name: str
    ) -> None:
        """Set up the threads.

        Args:
            slots: Where the blocks go.
            changes: Where the fetches are reported.
            source: Where the blocks come from.
            num_threads: That fetch at a time.
            name: Of the threads.
        """
        self._slots = slots
        self._changes = changes
        self._source = source
        self._threads = ThreadPoolExecutor(num_threads, name)

    def submit(self, moves: Sequence[KVMove]) -> None:
        """Fetch blocks, each to the slot of its move."""
        for move in moves:
            self._threads.submit(self._fetch, move, self._changes.generation)

    def close(self) -> None:
        """End the threads, behind the fetches that are running."""
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, move: KVMove, generation: int) -> None:
        names, whole = (move.name,), False
        try:
            with self._slots.held(move.slot) as block:
                # Read while the slot is held: a reset has given it away, or will find it held.
                if generation == self._changes.generation:
                    whole = self._source(move.name, block)
        finally:
            # In any case: a sequence waits for the report.
            change = TiersChanged(fetched=names) if whole else TiersChanged(lost=names)
            self._changes.add(change, generation)
