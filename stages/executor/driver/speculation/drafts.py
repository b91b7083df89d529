"""Drafts: guesses at how sequences go on. A wrong one costs time and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from .....bus.messages import CacheScope
from ...runner.interface import IntArray
from ..constraints import Constraints


class DraftContext(msgspec.Struct, frozen=True):
    """A sequence for which a draft is wanted.

    Attributes:
        row: Its row in the SequenceTable.
        seq_id: Tells it from others that had the row before.
        tokens: `[known]`, prompt and generated tokens; a view that holds for this step only.
        num_prompt: How many of them are the prompt.
        scope: Sequences learn only from those of the same scope.
        prediction: What the client expects to come.
        limit: Most tokens that the draft may have, at least 1.
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
        likelihoods: How likely the source finds each token, given that those before it are right;
            a single one where all are as likely, none where it has no opinion.
        source: Whose guess it is.
    """

    tokens: tuple[int, ...] = ()
    likelihoods: tuple[float, ...] = ()
    source: str = ""


NO_DRAFT = Draft()


class DraftSource(Protocol):
    """Guesses how sequences go on.

    Nothing that it says can change a token, so it may forget what it likes, and know nothing of
    preemptions and failures. It must not take long: everybody waits for it.
    """

    name: ClassVar[str]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """A draft for each sequence, of at most `limit` tokens each; NO_DRAFT where it has none."""
        ...

    def forget(self, row: int, seq_id: int) -> None:
        """A sequence is about to leave the table; what others may learn from it may stay."""
        ...

    def clear(self) -> None:
        """All sequences have left."""
        ...


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


class ForcedSource:
    """The tokens by which a constrained text can only go on, in their usual form.

    A model may write the same text in other tokens, so even these have to be verified.
    """

    name: ClassVar[str] = "grammar"

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(context) for context in contexts]

    def forget(self, row: int, seq_id: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def _propose(self, context: DraftContext) -> Draft:
        tokens = self._constraints.forced(context.row)[: context.limit]
        return Draft(tokens, source=self.name) if tokens else NO_DRAFT
