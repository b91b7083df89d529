"""Fetches: blocks that come to host slots in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .....bus.control import TiersChanged
from .....bus.steps import KVMove
from .changes import Changes
from .host_slots import HostSlots

BLOCKS_AT_ONCE = 32
"""The most that one thread takes, and reports together: a report wakes batching, which costs as
much as reading a block."""

REPORT_AFTER_S = 0.001
"""Seconds after which the blocks of a slow source are reported one by one."""

Source = Callable[[bytes, memoryview], bool]
"""Writes the block of a name to memory, from any thread. Returns whether the block is whole: then
all bytes are written and checked. If not, the bytes mean nothing."""


class Fetches:
    """Threads that write blocks from a source to host slots.

    Each fetch is reported as fetched or lost, unless the tiers were reset meanwhile. A fetch that
    is running at a reset still writes to its slot: the next user of the slot waits for it.
    """

    def __init__(
        self, slots: HostSlots, changes: Changes, source: Source, num_threads: int, name: str
    ) -> None:
        """Set up the threads.

        Args:
            slots: Destination of the blocks.
            changes: Receives reports of fetches.
            source: Source of the blocks.
            num_threads: Number of threads that fetch at a time.
            name: Name of the threads.
        """
        self._slots = slots
        self._changes = changes
        self._source = source
        self._threads = ThreadPoolExecutor(num_threads, name)

    def submit(self, moves: Sequence[KVMove]) -> None:
        """Fetch blocks, each to the slot of its move."""
        for start in range(0, len(moves), BLOCKS_AT_ONCE):
            some = moves[start : start + BLOCKS_AT_ONCE]
            self._threads.submit(self._fetch, some, self._changes.generation)

    def close(self) -> None:
        """End the threads, after the fetches that are running."""
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, moves: Sequence[KVMove], generation: int) -> None:
        slot_of = {move.name: move.slot for move in moves}
        self._slots.hold(slot_of.values())
        fetched: list[bytes] = []
        reported = time.monotonic()
        try:
            for move in moves:
                # Checked while the slots are held: after an earlier reset they may have another
                # use, and after a later one their next user waits for the release.
                if generation != self._changes.generation:
                    break
                if not self._source(move.name, self._slots.memory[move.slot].data):
                    continue
                fetched.append(move.name)
                if time.monotonic() - reported > REPORT_AFTER_S:
                    self._slots.release([slot_of.pop(name) for name in fetched])
                    self._changes.add(TiersChanged(fetched=tuple(fetched)), generation)
                    fetched, reported = [], time.monotonic()
        finally:
            # In any case: sequences wait for the report.
            self._slots.release(slot_of.values())
            lost = tuple(name for name in slot_of if name not in fetched)
            change = TiersChanged(fetched=tuple(fetched), lost=lost)
            self._changes.add(change, generation)
