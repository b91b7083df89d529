"""Positions of prompts whose logits are read for logprobs, and the token ids wanted there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ..runner.interface import IntArray

if TYPE_CHECKING:
    from .sequences import SequenceTable


class ScoredPlaces(NamedTuple):
    """Positions of prompts whose logits a step reads.

    Attributes:
        which: `[sequences]`, indices of their rows in the step.
        rows: `[sequences]`, of the SequenceTable.
        counts: `[sequences]`, positions of each.
        positions: `[sum(counts)]`, in order for each sequence.
    """

    which: IntArray
    rows: IntArray
    counts: IntArray
    positions: IntArray


class Targets(NamedTuple):
    """The targets of a prompt.

    Attributes:
        positions: `[rows]`, in order: the positions whose logits are read.
        offsets: `[rows + 1]`, the targets before each of them.
        token_ids: `[targets]`.
    """

    positions: IntArray
    offsets: IntArray
    token_ids: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], start: int) -> Self:
        """Args: as in SamplingParams, `prompt_logprob_token_ids` and `prompt_logprob_start`."""
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum()))
        real = ids >= 0
        ends = np.concatenate(([0], np.cumsum(real)))[np.cumsum(counts)]
        counts = np.diff(ends, prepend=0)
        asked = np.flatnonzero(counts)
        offsets = np.concatenate(([0], ends[asked]))
        return cls(asked + start, offsets, ids[real])

    def within(self, start: int, end: int) -> slice:
        """Return the rows at positions from `start` on and before `end`."""
        first, last = np.searchsorted(self.positions, (start, end))
        return slice(int(first), int(last))


def take_scored(table: SequenceTable, rows: IntArray, num_tokens: IntArray) -> ScoredPlaces | None:
    """Return the positions of prompts whose logits a step of so many tokens reads, for logprobs of
    the tokens after them; None without any. Each position is returned once."""
    which, positions = [], []
    for index in np.flatnonzero(table.scores[rows]).tolist():
        row = rows[index]
        last = int(table.num_known[row] - table.num_generated[row]) - 1
        start = int(table.num_computed[row])
        end = start + int(num_tokens[index])
        table.scores[row] = end <= last
        if table.prompt_logprobs[row] >= 0:
            found = np.arange(max(start, int(table.score_start[row])), min(end, last))
        else:
            targets: Targets = table.targets[row]
            found = targets.positions[targets.within(start, min(end, last))]
        if len(found):
            which.append(index)
            positions.append(found)
    if not which:
        return None
    counts = np.array([*map(len, positions)], np.int64)
    where = np.array(which, np.int64)
    return ScoredPlaces(where, rows[where], counts, np.concatenate(positions))
