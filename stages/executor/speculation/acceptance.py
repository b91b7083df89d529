"""How likely drafted tokens are to be accepted, by what became of those before them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafts import NO_DRAFT, Draft

_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Likelihoods between two of these are one class."""

_NO_OPINION = len(_EDGES) + 1
_NUM_CLASSES = _NO_OPINION + 1

_AFTER_WRONG, _AFTER_RIGHT, _FIRST, _SECOND, _LATER = range(5)
"""Where in a draft a place is. Texts that a source knows come in stretches, so for a first place it
matters whether the source was right about the token before, where that is known."""

_FIRST_GUESSES = (0.3, 0.4, 0.4, 0.6, 0.7)
"""By where a place is, if a source has no opinion and no history: as if a few had been seen."""

_FIRST_TRIALS = 4.0
_MOST_TRIALS = 256.0
_FADING = 1 - 1 / _MOST_TRIALS
_RATES = (0.12, 0.12, 0.12, 0.04, 0.04)
_CERTAIN = 0.15
_MOST_LEANING = 5.0
_LEAST_CHANCE = 0.01
"""Places that are accepted more seldom are not worth a thought."""

_FEWEST = 0.25
"""Of neither outcome less than this is taken to have been seen, so that nothing is certain."""


class SourceHistory:
    """What became of a source's drafts, whosever they were.

    Attributes:
        log_odds: By `place_class`, that a place is accepted if those before it were.
    """

    def __init__(self) -> None:
        bounds = itertools.pairwise((0.0, *_EDGES, 1.0))
        guesses = [(low + high) / 2 for low, high in bounds]
        guesses = [guess for first in _FIRST_GUESSES for guess in (*guesses, first)]
        self._accepted = [_FIRST_TRIALS * guess for guess in guesses]
        self._rejected = [_FIRST_TRIALS * (1 - guess) for guess in guesses]
        self.log_odds = [math.log(guess / (1 - guess)) for guess in guesses]

    def learn(self, place_class: int, hits: int, misses: int) -> None:
        """Places of a class were reached. What is long ago counts less and less."""
        accepted, rejected = self._accepted[place_class], self._rejected[place_class]
        if accepted + rejected > _MOST_TRIALS:
            fading = _FADING ** (hits + misses)
            accepted *= fading
            rejected *= fading
        accepted = max(accepted + hits, _FEWEST)
        rejected = max(rejected + misses, _FEWEST)
        self._accepted[place_class], self._rejected[place_class] = accepted, rejected
        self.log_odds[place_class] = math.log(accepted / rejected)


def place_classes(draft: Draft, start: int, stop: int, first: int) -> list[int]:
    """With which other places those of a draft are counted: with those as deep, and as likely.

    A likelihood that is no number counts as 0. `first`: of a first place, what was before it.
    """
    deep = (first, _SECOND, *(_LATER,) * (stop - 2))[start:stop]
    if not draft.likelihoods:
        return [where * _NUM_CLASSES + _NO_OPINION for where in deep]
    kinds = [
        bisect_right(_EDGES, likelihood) if likelihood > 0 else 0
        for likelihood in draft.likelihoods[start:stop]
    ]
    kinds += [_NO_OPINION] * (len(deep) - len(kinds))
    return [where * _NUM_CLASSES + kind for where, kind in zip(deep, kinds, strict=True)]


@dataclass(slots=True)
class _RowHistory:
    """What became of the drafts of one sequence.

    Attributes:
        leanings: By source, how much likelier than those of others its drafts are accepted, as
            differences of log odds, by where a place is.
        right: By source, whether it was when it was last compared with the text.
        rest: A draft that has been right so far, and its first place that was not reached.
    """

    leanings: dict[str, list[float]] = field(default_factory=dict)
    right: dict[str, bool] = field(default_factory=dict)
    rest: tuple[Draft, int] = (NO_DRAFT, 0)


class Acceptance:
    """What is to be expected of drafts.

    All sequences share what is known of a source: how often places as deep and as likely as this
    one were accepted. Beside it each sequence has its own leaning, which the newest outcomes move
    most, so that it follows a text that changes.

    Whether a place is right shows as soon as the sequence gets that token, verified or not. So a
    source that was of no use is still compared with the text, at no cost for the device, and its
    drafts are verified again once they would have been right.
    """

    def __init__(self) -> None:
        self._sources: dict[str, SourceHistory] = {}
        self._rows: dict[int, _RowHistory] = {}

    def begin(self, row: int) -> None:
        """A row has a new sequence, of which nothing is known."""
        self._rows[row] = _RowHistory()

    def forget(self, row: int) -> None:
        """The sequence of a row has left."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """All sequences have left; what is known of sources stays."""
        self._rows.clear()

    def expected(self, row: int, draft: Draft) -> list[float]:
        """How likely it is, place for place, that a row's draft is accepted up to there.

        It falls, and ends where nothing is to be expected any more.
        """
        history, leanings = self._of(row, draft.source)
        classes = place_classes(draft, 0, len(draft.tokens), self._first(row, draft.source))
        # Most places are of the same few classes.
        shares: dict[int, float] = {}
        chances: list[float] = []
        chance = 1.0
        for kind in classes:
            share = shares.get(kind)
            if share is None:
                odds = history.log_odds[kind] + leanings[kind // _NUM_CLASSES]
                share = shares[kind] = 1 / (1 + math.exp(-odds))
            chance *= share
            if chances and chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        """Learns from the tokens that a row got in a step.

        Args:
            row: The row.
            draft: What was proposed for it, the whole of it, verified or not.
            got: The tokens, in order.
        """
        before = self._row(row).rest
        new = self._follow(row, draft, 0, got)
        # Behind the new draft, of which it must not be known yet whether the source is right.
        rest = self._follow(row, *before, got)
        self._row(row).rest = rest if rest[0].tokens else new

    def _follow(self, row: int, draft: Draft, start: int, got: Sequence[int]) -> tuple[Draft, int]:
        """Compares a draft with what came, from a place on; what of it is still to come."""
        if not draft.tokens:
            return NO_DRAFT, 0
        last = min(len(got), len(draft.tokens) - start)
        matched = 0
        while matched < last and draft.tokens[start + matched] == got[matched]:
            matched += 1
        wrong = matched < last
        first = self._first(row, draft.source)
        classes = place_classes(draft, start, start + matched + wrong, first)
        if classes:
            self._row(row).right[draft.source] = not wrong
            for kind, places in itertools.groupby(classes[:matched]):
                self._learn(row, draft.source, kind, len(list(places)), 0)
            if wrong:
                self._learn(row, draft.source, classes[-1], 0, 1)
        rest = start + last
        return (NO_DRAFT, 0) if wrong or rest == len(draft.tokens) else (draft, rest)

    def _learn(self, row: int, source: str, kind: int, hits: int, misses: int) -> None:
        history, leanings = self._of(row, source)
        where, opinion = divmod(kind, _NUM_CLASSES)
        leaning = leanings[where]
        chance = 1 / (1 + math.exp(-history.log_odds[kind] - leaning))
        # A step of Newton's method, but for the bound: one outcome says only so much.
        surprise = hits - (hits + misses) * chance
        leaning += _RATES[where] * surprise / max(chance * (1 - chance), _CERTAIN)
        leanings[where] = max(-_MOST_LEANING, min(leaning, _MOST_LEANING))
        history.learn(kind, hits, misses)
        if where < _FIRST:
            history.learn(_FIRST * _NUM_CLASSES + opinion, hits, misses)

    def _first(self, row: int, source: str) -> int:
        right = self._row(row).right.get(source)
        return _FIRST if right is None else _AFTER_RIGHT if right else _AFTER_WRONG

    def _row(self, row: int) -> _RowHistory:
        return self._rows.setdefault(row, _RowHistory())

    def _of(self, row: int, source: str) -> tuple[SourceHistory, list[float]]:
        history = self._sources.get(source)
        if history is None:
            history = self._sources[source] = SourceHistory()
        return history, self._row(row).leanings.setdefault(source, [0.0] * len(_FIRST_GUESSES))
