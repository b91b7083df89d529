"""Drafts from what the client expects to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...runner.interface import IntArray
from .drafts import NO_DRAFT, Draft, DraftContext
from .ngram import same_before

_LONGEST_MATCH = 16
"""So many tokens before a place tell it from any other."""


class PredictionSource:
    """Goes on in the client's text from where the sample is in it.

    That is where the tokens that were generated last stand in it, the longest run of them; of
    several such places the next one behind the place before.
    """

    name: ClassVar[str] = "prediction"

    def __init__(self) -> None:
        # By row: whose, what is expected, and how far the sample was in it.
        self._places: dict[int, tuple[int, IntArray, int]] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(c) if c.prediction else NO_DRAFT for c in contexts]

    def forget(self, row: int, seq_id: int) -> None:
        if row in self._places and self._places[row][0] == seq_id:
            del self._places[row]

    def clear(self) -> None:
        self._places.clear()

    def _propose(self, context: DraftContext) -> Draft:
        seq_id, expected, before = self._places.get(context.row, (-1, None, 0))
        if seq_id != context.seq_id or expected is None:
            expected, before = np.array(context.prediction, np.int64), 0
        generated = context.tokens[context.num_prompt :]
        place = _find(expected, generated[-_LONGEST_MATCH:], before) if generated.size else 0
        self._places[context.row] = context.seq_id, expected, before if place is None else place
        if place is None:
            return NO_DRAFT
        tokens = tuple(expected[place : place + context.limit].tolist())
        return Draft(tokens, source=self.name) if tokens else NO_DRAFT


def _find(expected: IntArray, last: IntArray, before: int) -> int | None:
    """The place in a text that follows some tokens, `[at least 1]`; None where the last one is not
    in it. `before`: where it is looked for first, if there are several as good."""
    ends = np.flatnonzero(expected == last[-1])
    if not ends.size:
        return None
    if len(last) > 1:
        closer = ends[(ends > 0) & (expected[ends - 1] == last[-2])]
        ends = closer if closer.size else ends
    lengths = same_before(expected, ends, last)
    best = ends[lengths == lengths.max()] + 1
    following = best[best > before]
    return int(following[0] if following.size else best[0])
