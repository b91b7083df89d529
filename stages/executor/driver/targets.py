"""Positions of prompts whose logits are read for logprobs, and the token ids wanted there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from ..runner.interface import IntArray


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
