"""Drafts: guesses at how sequences go on. A wrong one costs time and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from .....bus.messages import CacheScope
from ...runner.interface import IntArray
from ..constraints import Constraints


class DraftContext(msgspec.Struct, frozen=True):
    """A sequence for which a draft is wanted.

    Attributes:
        row: Its row in the SequenceTable.
        seq_id: Distinguishes it from earlier sequences in this row.
        tokens: `[known]`, prompt and generated tokens; a view that holds for this step only.
        num_prompt: Tokens of the prompt.
        scope: Sequences learn only from those of the same scope.
        prediction: The client's predicted output.
        limit: The most tokens of the draft, at least 1.
    """

    row: int
    seq_id: int
    tokens: IntArray
    num_prompt: int
    scope: CacheScope
    prediction: tuple[int, ...]
    limit: int


class Draft(msgspec.Struct, frozen=True):
    """Drafted tokens of one sequence.

    Attributes:
        tokens: The guess; empty for none.
        likelihoods: The source's estimate for each token, given the tokens before it; a single one
            if all are equal, none without an estimate.
        source: The source's name.
    """

    tokens: tuple[int, ...] = ()
    likelihoods: tuple[float, ...] = ()
    source: str = ""


NO_DRAFT = Draft()


class DraftSource:
    """Base of the sources of guesses at the next tokens.

    A guess can't change a token, so a source may lose its state, and ignores preemptions and
    failures. Every sequence of the step waits for it.
    """

    name: ClassVar[str]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return a draft of at most `limit` tokens for each sequence; NO_DRAFT for none."""
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> Draft:
        """Return the draft of one sequence."""
        raise NotImplementedError

    def forget(self, row: int, seq_id: int) -> None:
        """A sequence is about to leave the table."""

    def clear(self) -> None:
        """All sequences have left."""


_LONGEST_MATCH = 16
"""Compared tokens before a place."""

_LOOK_BACK = 8192
"""Searched tokens, the newest ones of a sequence; some ten microseconds."""

_LIKELIHOODS = ((8, 0.9), (4, 0.8), (3, 0.6), (2, 0.4))
"""(Least matching tokens before a draft, its likelihood)."""


class NgramSource(DraftSource):
    """Repeats the sequence, prompt included, from the place with the longest match of the last 2 to
    16 tokens; of several such places, the newest."""

    name: ClassVar[str] = "ngram"

    def _propose(self, context: DraftContext) -> Draft:
        text = context.tokens[-_LOOK_BACK:]
        if len(text) < 3:
            return NO_DRAFT
        before, last = text[-2:].tolist()
        # Earlier places of the last two tokens.
        ends = np.flatnonzero(text[1:-1] == last) + 1
        ends = ends[text[ends - 1] == before]
        if not ends.size:
            return NO_DRAFT
        lengths = same_before(text, ends, text[-_LONGEST_MATCH:])
        best = ends.size - 1 - int(lengths[::-1].argmax())
        length = int(lengths[best])
        # Past the end, the text repeats itself.
        behind = np.resize(text[ends[best] + 1 :], context.limit)
        likelihood = next(each for least, each in _LIKELIHOODS if length >= least)
        return Draft(tuple(behind.tolist()), (likelihood,), self.name)


def same_before(text: IntArray, ends: IntArray, last: IntArray) -> IntArray:
    """Return how many of a sequence's last tokens a text has up to each place, `[ends]`.

    Args:
        text: The text to search.
        ends: Places in it that hold the last token.
        last: `[at least 1]`, the last tokens.
    """
    back = np.arange(1, len(last))
    places = ends[:, None] - back
    same = (text[np.maximum(places, 0)] == last[-1 - back]) & (places >= 0)
    lengths: IntArray = np.logical_and.accumulate(same, axis=1).sum(axis=1) + 1
    return lengths


class PredictionSource(DraftSource):
    """Continues in the client's predicted output.

    The place is that of the longest match of the last generated tokens; of several such places,
    the next one behind the previous place.
    """

    name: ClassVar[str] = "prediction"

    def __init__(self) -> None:
        # By row: the sequence, its prediction, and the place reached in it.
        self._places: dict[int, tuple[int, IntArray, int]] = {}

    def forget(self, row: int, seq_id: int) -> None:
        if row in self._places and self._places[row][0] == seq_id:
            del self._places[row]

    def clear(self) -> None:
        self._places.clear()

    def _propose(self, context: DraftContext) -> Draft:
        if not context.prediction:
            return NO_DRAFT
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
    """Return the place in a text behind some tokens, `[at least 1]`; None if the last one is
    missing. `before`: of equal matches, the first one behind this place is preferred."""
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


class ForcedSource(DraftSource):
    """The only tokens that a grammar allows next, in their usual form.

    A model may write the same text in other tokens, so these are verified too.
    """

    name: ClassVar[str] = "grammar"

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def _propose(self, context: DraftContext) -> Draft:
        tokens = self._constraints.forced(context.row)[: context.limit]
        return Draft(tokens, source=self.name) if tokens else NO_DRAFT
