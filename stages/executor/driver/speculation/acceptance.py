"""Estimates of how likely drafted tokens are accepted, from the fate of earlier ones."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafts import Draft

_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Bounds of the classes of likelihoods."""

_NO_OPINION = len(_EDGES) + 1
_NUM_CLASSES = _NO_OPINION + 1

_AFTER_WRONG, _AFTER_RIGHT, _FIRST, _SECOND, _LATER = range(5)
"""Position classes of a draft. Predictable text comes in stretches, so the first position has
classes for a source that was right or wrong about the token before."""

_FIRST_GUESSES = (0.3, 0.4, 0.4, 0.6, 0.7)
"""Prior acceptance by position class, for a source without likelihoods and history."""

_FIRST_TRIALS = 4.0
_MOST_TRIALS = 256.0
_FADING = 1 - 1 / _MOST_TRIALS
_RATES = (0.12, 0.12, 0.12, 0.04, 0.04)
_CERTAIN = 0.15
_MOST_LEANING = 5.0
_LEAST_CHANCE = 0.03
"""The least chance of acceptance that is considered."""

_FEWEST = 0.25
"""The least count of either outcome, so that no estimate is certain."""


class SourceHistory:
    """The outcomes of a source's drafts, over all sequences.

    Attributes:
        log_odds: By class, of the acceptance of a place if those before it were accepted.
    """

    def __init__(self) -> None:
        bounds = itertools.pairwise((0.0, *_EDGES, 1.0))
        guesses = [(low + high) / 2 for low, high in bounds]
        guesses = [guess for first in _FIRST_GUESSES for guess in (*guesses, first)]
        self._accepted = [_FIRST_TRIALS * guess for guess in guesses]
        self._rejected = [_FIRST_TRIALS * (1 - guess) for guess in guesses]
        self.log_odds = [math.log(guess / (1 - guess)) for guess in guesses]

    def learn(self, place_class: int, hits: int, misses: int) -> None:
        """Count outcomes of a class. Old outcomes fade."""
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
    """The deviation of one sequence from the average of a source.

    Attributes:
        odds: Differences of log odds, by position class.
        first: Position class of a draft's first place: whether the source was right when last
            compared with the text.
    """

    odds: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_GUESSES))
    first: int = _FIRST


class Acceptance:
    """Acceptance estimates for drafts.

    All sequences share the history of a source: how often places as deep and as likely were
    accepted. Each sequence adds its own deviation, which the newest outcomes move most, so that it
    follows a text that changes.

    A draft's first tokens are compared with the text whether they were verified or not. So a source
    that failed is still measured, at no cost for the device, and is used again once it is right.
    """

    def __init__(self) -> None:
        self._sources: defaultdict[str, SourceHistory] = defaultdict(SourceHistory)
        # By row of the table and source.
        self._rows: defaultdict[int, defaultdict[str, _Leaning]] = defaultdict(
            lambda: defaultdict(_Leaning)
        )

    def forget(self, row: int) -> None:
        """The sequence of a row has left."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """All sequences have left; the history of sources stays."""
        self._rows.clear()

    def expected(self, row: int, draft: Draft) -> list[float]:
        """Return, for each place, the chance that a row's draft is accepted up to there.

        The chances fall, and end where they become negligible.
        """
        history, leaning = self._sources[draft.source], self._rows[row][draft.source]
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
        """Learn from the tokens of a row in a step.

        Args:
            row: The row.
            draft: Its whole draft, verified or not.
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
        history, leaning = self._sources[draft.source], self._rows[row][draft.source]
        reached = matched + wrong
        opinions = _opinions(draft)
        where = leaning.first
        # Places of one class are counted together.
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
    """Return the likelihood class of each place of a draft; NaN counts as 0."""
    count, likelihoods = len(draft.tokens), draft.likelihoods
    if len(likelihoods) == 1:
        return (_opinion(likelihoods[0]),) * count
    known = [_opinion(likelihood) for likelihood in likelihoods[:count]]
    return known + [_NO_OPINION] * (count - len(known))


def _opinion(likelihood: float) -> int:
    return bisect_right(_EDGES, likelihood) if likelihood > 0 else 0
