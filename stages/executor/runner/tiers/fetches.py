"""Fetches: blocks that come to host slots in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .....bus.control import TiersChanged
from .....bus.messages import KVMove
from .changes import TierChanges
from .host_slots import HostSlots

BLOCKS_PER_REPORT = 8
"""A report wakes batching, which takes longer than reading a block."""

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
        for start in range(0, len(moves), BLOCKS_PER_REPORT):
            some = moves[start : start + BLOCKS_PER_REPORT]
            self._threads.submit(self._fetch, some, self._changes.generation)

    def close(self) -> None:
        """End the threads, behind the fetches that are running."""
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, moves: Sequence[KVMove], generation: int) -> None:
        fetched: list[bytes] = []
        try:
            for move in moves:
                with self._slots.held(move.slot) as block:
                    # Looked up while the slot is held: a reset before gave the slot away, and
                    # whoever uses it after a later one waits.
                    if generation != self._changes.generation:
                        return
                    if self._source(move.name, block):
                        fetched.append(move.name)
        finally:
            # In any case: sequences wait for the report.
            lost = tuple(move.name for move in moves if move.name not in fetched)
            change = TiersChanged(fetched=tuple(fetched), lost=lost)
            self._changes.add(change, generation)
