"""Drafts from the sequence's own earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...runner.interface import IntArray
from .drafts import NO_DRAFT, Draft, DraftContext

_LONGEST_MATCH = 16
"""So many tokens before a place tell it from any other."""

_LOOK_BACK = 8192
"""Tokens of a sequence, the newest ones, among which is looked; in some ten microseconds."""

_LIKELIHOODS = ((8, 0.9), (4, 0.8), (3, 0.6), (2, 0.4))
"""How likely a draft is of which so many tokens at least are the same before it."""


class NgramSource:
    """Goes on as a sequence, its prompt included, went on behind the same 2 to 16 tokens: the most
    that there are, and of several such places the newest."""

    name: ClassVar[str] = "ngram"

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(context) for context in contexts]

    def forget(self, row: int, seq_id: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def _propose(self, context: DraftContext) -> Draft:
        text = context.tokens[-_LOOK_BACK:]
        if len(text) < 3:
            return NO_DRAFT
        before, last = text[-2:].tolist()
        # Where the last two stand, but for the end.
        ends = np.flatnonzero(text[1:-1] == last) + 1
        ends = ends[text[ends - 1] == before]
        if not ends.size:
            return NO_DRAFT
        lengths = same_before(text, ends, text[-_LONGEST_MATCH:])
        best = ends.size - 1 - int(lengths[::-1].argmax())
        length = int(lengths[best])
        # What comes behind the end is what a text says that repeats itself.
        behind = np.resize(text[ends[best] + 1 :], context.limit)
        likelihood = next(each for least, each in _LIKELIHOODS if length >= least)
        return Draft(tuple(behind.tolist()), (likelihood,), self.name)


def same_before(text: IntArray, ends: IntArray, last: IntArray) -> IntArray:
    """How many of a sequence's last tokens stand in a text up to and with each place, `[ends]`.

    Args:
        text: Where they are looked for.
        ends: Places in it of the very last one.
        last: `[at least 1]`, more of them are not looked for.
    """
    back = np.arange(1, len(last))
    places = ends[:, None] - back
    same = (text[np.maximum(places, 0)] == last[-1 - back]) & (places >= 0)
    lengths: IntArray = np.logical_and.accumulate(same, axis=1).sum(axis=1) + 1
    return lengths
