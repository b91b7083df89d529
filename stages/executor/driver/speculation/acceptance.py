"""How likely drafted tokens are to be accepted, by what became of those before them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafts import Draft

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
_LEAST_CHANCE = 0.03
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


@dataclass(slots=True)
class _Leaning:
    """How one sequence differs from the others in what becomes of a source's drafts.

    Attributes:
        odds: How much likelier they are accepted, as differences of log odds, by where a place is.
        first: Where a draft's first place is: that depends on whether the source was right when it
            was last compared with the text.
    """

    odds: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_GUESSES))
    first: int = _FIRST


class Acceptance:
    """What is to be expected of drafts.

    All sequences share what is known of a source: how often places as deep and as likely as this
    one were accepted. Beside it each sequence has its own leaning, which the newest outcomes move
    most, so that it follows a text that changes.

    Whether a draft's first tokens are right shows as soon as the sequence gets these, verified or
    not. So a source that was of no use is still compared with the text, at no cost for the device,
    and its drafts are verified again once they would have been right.
    """

    def __init__(self) -> None:
        self._sources: dict[str, SourceHistory] = {}
        self._rows: dict[int, dict[str, _Leaning]] = {}

    def begin(self, row: int) -> None:
        """A row has a new sequence, of which nothing is known."""
        self._rows[row] = {}

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
        history, leaning = self._of(row, draft.source)
        log_odds, odds, opinions = history.log_odds, leaning.odds, _opinions(draft)
        where, known, share = leaning.first, None, 0.0
        chances: list[float] = []
        chance = 1.0
        for opinion in opinions:
            if (where, opinion) != known:
                known = where, opinion
                share = 1 / (1 + math.exp(-log_odds[where * _NUM_CLASSES + opinion] - odds[where]))
            chance *= share
            if chances and chance < _LEAST_CHANCE:
                break
            chances.append(chance)
            where = _LATER if len(chances) > 1 else _SECOND
        return chances

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        """Learns from the tokens that a row got in a step.

        Args:
            row: The row.
            draft: What was proposed for it, the whole of it, verified or not.
            got: The tokens, in order.
        """
        tokens = draft.tokens
        last = min(len(got), len(tokens))
        if not last:
            return
        matched = 0
        while matched < last and tokens[matched] == got[matched]:
            matched += 1
        wrong = matched < last
        history, leaning = self._of(row, draft.source)
        reached = matched + wrong
        opinions = _opinions(draft)
        where = leaning.first
        # Places of one class together.
        place = 0
        while place < reached:
            stop = place + 1
            while stop < reached and place > 1 and opinions[stop] == opinions[place]:
                stop += 1
            misses = int(wrong and stop == reached)
            _learn(history, leaning, where, opinions[place], stop - place - misses, misses)
            where = _SECOND if stop == 1 else _LATER
            place = stop
        leaning.first = _AFTER_WRONG if wrong else _AFTER_RIGHT

    def _of(self, row: int, source: str) -> tuple[SourceHistory, _Leaning]:
        history = self._sources.get(source)
        if history is None:
            history = self._sources[source] = SourceHistory()
        leanings = self._rows.get(row)
        if leanings is None:
            leanings = self._rows[row] = {}
        leaning = leanings.get(source)
        if leaning is None:
            leaning = leanings[source] = _Leaning()
        return history, leaning


def _learn(
    history: SourceHistory, leaning: _Leaning, where: int, opinion: int, hits: int, misses: int
) -> None:
    kind = where * _NUM_CLASSES + opinion
    own = leaning.odds[where]
    chance = 1 / (1 + math.exp(-history.log_odds[kind] - own))
    # A step of Newton's method, but for the bound: one outcome says only so much.
    surprise = hits - (hits + misses) * chance
    own += _RATES[where] * surprise / max(chance * (1 - chance), _CERTAIN)
    leaning.odds[where] = max(-_MOST_LEANING, min(own, _MOST_LEANING))
    history.learn(kind, hits, misses)
    if where < _FIRST:
        history.learn(_FIRST * _NUM_CLASSES + opinion, hits, misses)


def _opinions(draft: Draft) -> Sequence[int]:
    """With which other places each of a draft is counted: with those as likely.

    A likelihood that is no number counts as 0.
    """
    count, likelihoods = len(draft.tokens), draft.likelihoods
    if len(likelihoods) == 1:
        return (_opinion(likelihoods[0]),) * count
    known = [_opinion(likelihood) for likelihood in likelihoods[:count]]
    return known + [_NO_OPINION] * (count - len(known))


def _opinion(likelihood: float) -> int:
    return bisect_right(_EDGES, likelihood) if likelihood > 0 else 0
