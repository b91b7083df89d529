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

    def __init__(self, table: SequenceTable, cache: KVCache, num_scratch: int = 0) -> None:
        """Take the table. `num_scratch`: of the cache's slots, the last ones, for roll-back."""
        self._table, self._cache = table, cache
        self._num_rows, self._num_scratch = cache.num_slots - num_scratch, num_scratch
        self._after: IntArray = np.full(self._num_rows, _UNKNOWN)
        self._saves: dict[int, list[StateSave]] = {}
        # By row with drafted tokens: the slots of the states before each of them.
        self._before_drafts: dict[int, list[int]] = {}

    def add(self, new: NewSequence) -> None:
        """Set the state in which a sequence of the table begins.

        Raises:
            ValueError: The snapshot is unknown, or there is no slot for the sequence.
        """
        row = self._table.row_of(new.seq_id)
        if row is None or row >= self._num_rows:
            raise ValueError(f"sequence {new.seq_id} has no state slot; there are {self._num_rows}")
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

    def draftable(self, num_tokens: IntArray, num_drafts: IntArray) -> IntArray:
        """Return how many of the drafted tokens a step can verify, `[rows]`: as many as there is
        scratch memory for, and none where others share the prefill and so the state."""
        shared = np.append(num_tokens[1:] == 0, False)
        wanted = np.where(shared, 0, num_drafts)
        room = self._num_scratch - (wanted.cumsum() - wanted)
        found: IntArray = np.minimum(wanted, np.maximum(room, 0))
        return found

    def put_in(self, batch: Rows, rows: IntArray, ahead: IntArray) -> Rows:
        """Return a batch with its states.

        Args:
            batch: The rows of a step, those of one sequence in order.
            rows: Their rows of the table.
            ahead: Drafted tokens before each row's first one.

        Raises:
            ValueError: The state of a sequence is not that after its computed tokens, or a snapshot
                is of tokens that the step doesn't compute.
        """
        wrong = np.flatnonzero(self._after[rows] != batch.starts - ahead)
        if wrong.size:
            (seq_id,) = self._table.ids_of(rows[wrong[:1]]).tolist()
            raise ValueError(
                f"sequence {seq_id} goes on after {batch.starts[wrong[0]]} tokens, and its "
                f"recurrent state is that after {self._after[rows[wrong[0]]]} (-1: none); a "
                "sequence with cached tokens needs a snapshot"
            )
        saves = self._saves_of(batch, rows, ahead)
        if ahead.any():
            saves = self._with_scratch(saves, rows, ahead)
        return replace(batch, states=rows, saves=saves)

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

    def roll_back(self, rows: IntArray, accepted: IntArray) -> None:
        """Have the states of rows be those after their accepted drafted tokens, `[rows]`."""
        pairs = [
            (before[number], row)
            for row, number in zip(rows.tolist(), accepted.tolist(), strict=True)
            if number < len(before := self._before_drafts.get(row, []))
        ]
        self._cache.copy_slots(pairs)
        self._after[rows] += accepted

    def clear(self) -> None:
        """Drop all: there are no sequences any more. Snapshots stay."""
        self._after[:] = _UNKNOWN
        self._saves = {}

    def _with_scratch(self, saves: IntArray | None, rows: IntArray, ahead: IntArray) -> IntArray:
        """Return a step's saves with the states before each drafted token."""
        planned = {} if saves is None else {int(row): int(slot) for row, _, slot in saves}
        scratch = iter(range(self._num_rows, self._cache.num_slots))
        self._before_drafts = {}
        more = []
        for index in (np.flatnonzero(ahead) - 1).tolist():
            if (slot := planned.get(index)) is None:
                slot = next(scratch)
                more.append((index, 1, slot))
            self._before_drafts.setdefault(int(rows[index]), []).append(slot)
        found = np.array(more, np.int64).reshape(-1, 3)
        return found if saves is None else np.concatenate((saves, found))

    def _saves_of(self, batch: Rows, rows: IntArray, ahead: IntArray) -> IntArray | None:
        if not self._saves:
            return None
        found = []
        for index, seq_id in enumerate(self._table.ids_of(rows).tolist()):
            for save in () if ahead[index] else self._saves.get(seq_id, ()):
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
