"""Blocks of other executors that come to host slots in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, groupby
from operator import attrgetter, not_

from .....bus.control import TiersChanged
from .....bus.steps import KVMove
from .changes import Changes
from .host_slots import HostSlots
from .transports.peers import Peers, Transfer
from .transports.slots import WantedBlock

MOST_AT_ONCE = 64
"""Blocks of one transfer. The first blocks of a long prompt can be loaded while others come."""

MOST_WAIT_S = 60.0
"""Longest wait for blocks that are to be computed; then the offer has ended, too."""

_THREADS = 2
"""For each other executor: one that is slow delays no read from another."""


class PeerFetches:
    """Threads that read blocks of other executors, as `Fetches` reads those of the disk.

    All methods but `take_transfers` are for one thread.
    """

    def __init__(self, slots: HostSlots, changes: Changes, secret: str) -> None:
        """Args: where blocks go, where they are reported, and as for `Peers`."""
        self._slots = slots
        self._changes = changes
        self._peers = Peers(secret)
        self._transfers: list[Transfer] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._closed = False

    def submit(self, moves: Sequence[KVMove]) -> None:
        """Read blocks, each to the slot of its move, when the step is done that offers it.

        Moves come in the order of these steps, so one that waits delays only others that wait.
        """
        for (source, step), group in groupby(moves, attrgetter("source", "step")):
            if source not in self._threads:
                self._threads[source] = ThreadPoolExecutor(_THREADS, "kv-receive")
            asked_at, generation = time.perf_counter(), self._changes.generation
            for part in _parts(list(group)):
                self._threads[source].submit(self._fetch, source, step, part, generation, asked_at)

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers since the last call. Any thread."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def reset(self) -> None:
        """End all connections; what is being read is dropped."""
        self._peers.close()
        # The others may have ended, and come back under other addresses.
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()

    def close(self) -> None:
        """End all connections and threads."""
        self._closed = True
        self._peers.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._peers.close()

    def _fetch(
        self,
        source: str,
        step: int,
        moves: Sequence[KVMove],
        generation: int,
        asked_at: float,
    ) -> None:
        def is_over() -> bool:
            waited_s = time.perf_counter() - asked_at
            return self._closed or generation != self._changes.generation or waited_s > MOST_WAIT_S

        whole, slots = [False] * len(moves), [move.slot for move in moves]
        if step:
            self._peers.wait(source, step, asked_at, is_over)
        self._slots.hold(slots)
        try:
            if generation == self._changes.generation:
                memory = self._slots.memory
                wanted = [WantedBlock(m.other, m.source_name, memory[m.slot]) for m in moves]
                whole, transfer = self._peers.read(source, wanted, asked_at)
                self._transfers.append(transfer)
        finally:
            # In any case: sequences wait for the report.
            self._slots.release(slots)
            names = [move.name for move in moves]
            lost = tuple(compress(names, map(not_, whole)))
            change = TiersChanged(fetched=tuple(compress(names, whole)), lost=lost)
            self._changes.add(change, generation)


def _parts(moves: list[KVMove]) -> Iterator[list[KVMove]]:
    for start in range(0, len(moves), MOST_AT_ONCE):
        yield moves[start : start + MOST_AT_ONCE]
