"""Recurrent states of sequences: their slots in the cache, and their snapshots.

A sequence's slot is its row in the SequenceTable. Snapshots are the rows of the state tensors after
the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....bus.parts.states import StateSave, StateStart
from ....bus.steps import NewSequence
from ..runner.interface import IntArray, KVCache, Rows
from .sequences import SequenceTable

_UNKNOWN = -1


class SequenceStates:
    """The recurrent states of the sequences in a table.

    Each state is that after a number of leading tokens of its sequence, which must be the computed
    ones when a step goes on from it.
    """

    def __init__(self, table: SequenceTable, cache: KVCache) -> None:
        self._table, self._cache = table, cache
        self._after: IntArray = np.full(cache.num_slots, _UNKNOWN)
        self._saves: dict[int, list[StateSave]] = {}

    def add(self, new: NewSequence) -> None:
        """Set the state in which a sequence of the table begins.

        Raises:
            ValueError: The snapshot is unknown, or there is no slot for the sequence.
        """
        row = self._table.row_of(new.seq_id)
        if row is None or row >= self._cache.num_slots:
            raise ValueError(
                f"sequence {new.seq_id} has no state slot; there are {self._cache.num_slots}"
            )
        start = StateStart.find(new.parts)
        if start is not None:
            self._cache.copy_slots([(self._slot_of(start.snapshot), row)])
        # Without a snapshot only a shared prefill can set it.
        known = start is not None or not new.num_cached
        self._after[row] = new.num_cached if known else _UNKNOWN

    def plan(self, saves: Sequence[StateSave]) -> None:
        """Set the snapshots that the next step makes."""
        self._saves = {}
        for save in saves:
            self._saves.setdefault(save.seq_id, []).append(save)

    def put_in(self, batch: Rows, rows: IntArray) -> Rows:
        """Return a batch with its states.

        Args:
            batch: The rows of a step.
            rows: Their rows of the table.

        Raises:
            ValueError: The state of a sequence is not that after its computed tokens, or a snapshot
                is of tokens that the step doesn't compute.
        """
        wrong = np.flatnonzero(self._after[rows] != batch.starts)
        if wrong.size:
            (seq_id,) = self._table.ids_of(rows[wrong[:1]]).tolist()
            raise ValueError(
                f"sequence {seq_id} goes on after {batch.starts[wrong[0]]} tokens, and its "
                f"recurrent state is that after {self._after[rows[wrong[0]]]} (-1: none); a "
                "sequence with cached tokens needs a snapshot"
            )
        return replace(batch, states=rows, saves=self._saves_of(batch, rows))

    def advance(self, rows: IntArray, num_tokens: IntArray, ends: IntArray) -> None:
        """Have the states of a step be those after these many tokens, `[rows]` in plan order.

        Rows of 0 tokens get a copy of the state of the row whose prefill they share.
        """
        self._saves = {}
        self._after[rows] = ends
        if num_tokens.all():
            return
        computing = np.where(num_tokens > 0, np.arange(len(rows)), 0)
        leaders = rows[np.maximum.accumulate(computing)]
        shares = num_tokens == 0
        pairs = zip(leaders[shares].tolist(), rows[shares].tolist(), strict=True)
        self._cache.copy_slots(list(pairs))

    def clear(self) -> None:
        """Drop all: there are no sequences any more. Snapshots stay."""
        self._after[:] = _UNKNOWN
        self._saves = {}

    def _saves_of(self, batch: Rows, rows: IntArray) -> IntArray | None:
        if not self._saves:
            return None
        found = []
        for index, seq_id in enumerate(self._table.ids_of(rows).tolist()):
            for save in self._saves.get(seq_id, ()):
                place = save.num_tokens - int(batch.starts[index])
                if not 0 < place <= batch.num_tokens[index]:
                    raise ValueError(
                        f"the plan saves the state of sequence {seq_id} after {save.num_tokens} "
                        f"tokens, and computes {batch.num_tokens[index]} after "
                        f"{batch.starts[index]}"
                    )
                found.append((index, place, self._slot_of(save.snapshot)))
        return np.array(found, np.int64).reshape(-1, 3)

    def _slot_of(self, snapshot: int) -> int:
        if not 0 <= snapshot < self._cache.num_snapshots:
            raise ValueError(
                f"there is no snapshot {snapshot}; there are {self._cache.num_snapshots}"
            )
        return self._cache.num_slots + snapshot
