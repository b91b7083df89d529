"""Segments: the rows of a step as operators with recurrent state see them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..batch import IntArray, Rows


class Segments(msgspec.Struct, frozen=True, eq=False):
    """Runs of consecutive tokens of one sequence in a flattened batch, `[segments]` int64 each.

    Together they cover the batch in order. Two segments of one sequence follow each other, and the
    second starts from the state that the first leaves.

    Attributes:
        first: Index of the first token.
        count: Tokens, at least one.
        slot: Row of the state tensors that is read, and overwritten with the state after the
            last token.
        save: Row to which that state is copied, too; -1 for none.
    """

    first: IntArray
    count: IntArray
    slot: IntArray
    save: IntArray

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over the segments: first, end, slot, save."""
        ends = (self.first + self.count).tolist()
        columns = self.first.tolist(), ends, self.slot.tolist(), self.save.tolist()
        return zip(*columns, strict=True)


def segments_of(rows: Rows) -> Segments:
    """Cut the rows of a step into segments, so that each saved state is one at a segment's end.

    Raises:
        ValueError: The rows have no state slots, or two states of one position are saved.
    """
    if rows.states is None:
        raise ValueError("the model has a recurrent state, and the rows of the step have no slots")
    first = np.cumsum(rows.num_tokens) - rows.num_tokens
    saves = rows.saves
    if saves is None or not len(saves):
        return Segments(first, rows.num_tokens, rows.states, np.full_like(first, -1))
    # Each save ends a segment, and so does each row.
    row, place, target = saves.T
    ends = np.concatenate((first[row] + place, first + rows.num_tokens))
    owner = np.concatenate((row, np.arange(len(first))))
    target = np.concatenate((target, np.full_like(first, -1)))
    order = np.lexsort((-target, ends))
    ends, owner, target = ends[order], owner[order], target[order]
    # A save at a row's end comes before the end itself, which is dropped.
    again = np.append(False, ends[1:] == ends[:-1])
    if (again & (target >= 0)).any():
        raise ValueError("two snapshots of the same position of a sequence are to be saved")
    ends, owner, target = ends[~again], owner[~again], target[~again]
    starts = np.append(0, ends[:-1])
    return Segments(starts, ends - starts, rows.states[owner], target)
