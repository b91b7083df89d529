"""Which drafted tokens a step verifies, by costs and chances, and whether drafting pays at all."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .costs import LEAST_GAIN, StepCosts, StepLoad
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

MOST_ROWS = 512
"""The most rows of one token in a step, drafted ones included."""

# The ledger: weight of the newest step in averages; steps before the first judgement, at first and
# after each rest; the first rest; steps over which the cost of reading a prompt is spread.
_LEDGER_WEIGHT, _TRIAL_STEPS, _FIRST_REST, _READ_FOR = 0.1, 16, 16, 256

_NEAR = 64
"""Contexts within so many tokens share their costs."""

_ASKING_WEIGHT = 0.05
_FIRST_ASKING_S = 8e-6
"""The time to ask for one row's draft, until it is measured."""

_FREE = 0.01
"""The share of a step that asking may take without earning it, so that new drafts are found."""

_MOST_REST = 128
"""The longest rest of all sources, in steps, after they did not pay."""

_HOPELESS_STEPS = 16
"""The rest where no draft could pay in a step with as many rows."""


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


@dataclass(slots=True)
class DraftLedger:
    """The costs and gains of a source's drafts, in seconds per step.

    A source that costs more than it gains rests for 16 steps, then twice as many each time.

    Attributes:
        most_rest: The longest rest, in steps.
        spent: Average cost, with a part of the cost of steps without a draft.
        saved: Average gain.
    """

    most_rest: int
    spent: float = 0.0
    saved: float = 0.0
    _owed: float = 0.0
    _judged_in: int = _TRIAL_STEPS
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Return whether to ask the source in this step; counts a step of its rest."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    @property
    def rests(self) -> bool:
        """Whether the source rests."""
        return self._rest > 0

    def take_rest(self) -> int:
        """Return the steps to skip, and end the rest here: the caller enforces it."""
        rest, self._rest = self._rest, 0
        return rest

    def settle(self, spent: float, saved: float) -> None:
        """Record a step with a call of the source: its seconds, and those that it saved."""
        part = self._owed / _READ_FOR
        self._owed -= part
        self.spent += _LEDGER_WEIGHT * (spent + part - self.spent)
        self.saved += _LEDGER_WEIGHT * (saved - self.saved)
        self._judge(self.spent)

    def owe(self, seconds: float) -> None:
        """Record a step that took time and drafted nothing, as a model does that reads a prompt:
        later drafts have to earn it."""
        self._owed += seconds
        # A step without any request takes little time and says nothing about costs.
        if seconds > self.spent:
            # The average includes parts of the debt.
            self._judge(max(self.spent, self._owed / _READ_FOR))

    def _judge(self, spent: float) -> None:
        self._judged_in -= 1
        if self._judged_in > 0:
            return
        if self.saved >= LEAST_GAIN * spent:
            self._next_rest = _FIRST_REST
            return
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, self.most_rest)
        self._judged_in = _TRIAL_STEPS


class CostControl:
    """Verifies the drafted tokens that give the most tokens per second.

    Attributes:
        costs: Of steps.
        acceptance: The chances of drafts.
    """

    def __init__(self, costs: StepCosts, *, max_rows: int = MOST_ROWS) -> None:
        """`max_rows`: the most rows of one token in a step."""
        self.costs = costs
        self.acceptance = Acceptance()
        self._max_rows = max_rows
        # Of the current step. The time of a step with prompts says nothing about rows.
        self._load = StepLoad(0, 0, costs, max_rows)
        self._num_chosen = 0
        self._is_timed = True
        self._pays = False
        self._context = 0.0
        # The time to ask for a row and to learn from it.
        self._asking_s = _FIRST_ASKING_S
        self._ledger = DraftLedger(_MOST_REST)
        # Cached for one version of the costs, by contexts and kinds of steps.
        self._version = costs.version
        self._at: dict[int, StepCosts] = {}
        self._may_pay: dict[tuple[int, int, int], bool] = {}

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        """Begin a step; return whether drafts would pay if they were right.

        Args:
            num_rows: Rows of one token that the step has anyway.
            num_prefill: Tokens of its other rows.
            context: Average tokens before a row of one token.
        """
        self._num_chosen, self._context, self._is_timed = 0, context, False
        if self.costs.version != self._version:
            self._version = self.costs.version
            self._at.clear()
            self._may_pay.clear()
        near = int(context) // _NEAR
        if near not in self._at:
            self._at[near] = self.costs.at(near * _NEAR)
        self._load = StepLoad(num_rows, num_prefill, self._at[near], self._max_rows)
        step = num_rows, num_prefill, near
        if step not in self._may_pay:
            self._may_pay[step] = self._load.pays(self._asking_s * num_rows)
        self._pays = self._may_pay[step]
        return self._pays and not self._ledger.rests

    def rest(self) -> int:
        """Return the steps to skip before drafting again (backoff), after `begin` returned False.
        The caller enforces it."""
        if self._pays:
            return self._ledger.take_rest()
        # The end of a prompt, or its growth into a larger batch, may change the answer.
        return 0 if self._load.num_prefill else _HOPELESS_STEPS

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each draft to verify in this step, by `acceptance.expected`."""
        lengths = self._load.lengths(chances)
        self._num_chosen = sum(lengths)
        return lengths

    def spent(self, num_asked: int, seconds: float, num_accepted: int) -> None:
        """Record the end of a step: the rows asked for, the time of asking and learning without
        the draft model's passes, and the accepted tokens."""
        if num_asked:
            self._asking_s += _ASKING_WEIGHT * (seconds / num_asked - self._asking_s)
        took, saved = self.value(self._num_chosen, num_accepted)
        free = _FREE * self._load.costs.of(self._load.num_rows)
        self._ledger.settle(max(seconds - free, 0.0), max(saved - took, 0.0))

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        """Return the value of some drafted tokens of this step, apart from all others.

        Args:
            num_verified: How many of the tokens that `lengths` chose.
            num_accepted: How many of these were accepted.

        Returns:
            Seconds to verify them, and seconds that the accepted ones would take without drafts.
        """
        own_rows, num_prefill, costs, _ = self._load
        rows, own = own_rows + num_prefill + self._num_chosen, max(own_rows, 1)
        took = costs.of(rows) - costs.of(rows - num_verified)
        return took, num_accepted * costs.of(own) / own

    def timed(self, seconds: float) -> None:
        """Record the time of a step up to its tokens: of the last one that began, if any."""
        rows = self._load.num_rows + self._num_chosen
        if rows and not self._load.num_prefill and not self._is_timed:
            self.costs.observe(rows, seconds, self._context)
        else:
            self.costs.interrupt()
        self._is_timed = True

    def clear(self) -> None:
        """All sequences have left."""
        self.acceptance.clear()
        # The current step may have failed and will not be timed.
        self._is_timed = True
        self.costs.interrupt()
