"""Which drafted tokens a step verifies, by costs and chances, and whether drafting pays at all."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .costs import MOST_ROWS, StepCosts
from .drafts import Draft

LEAST_GAIN = 1.05
"""The least gain in tokens per second for which drafts are verified: costs are known to a few
percent."""

_NEWEST = 0.1
"""The weight of the newest outcome in a sequence's averages and of the newest step in a ledger's: a
text that changes is followed within ten tokens, and one lucky token is not believed."""

_NEWEST_OF_SOURCE = 1 / 64
"""The weight of the newest outcome in a source's averages, over all sequences: about as many as a
short answer has, so that one sequence decides little for the next."""

_AFTER_WRONG, _FIRST, _AFTER_RIGHT, _LATER = 0.12, 0.35, 0.4, 0.6
"""Places in a draft, each as the chance of acceptance without likelihoods and history. Predictable
text comes in stretches, so a draft's first place depends on whether the source was right about the
token before; a sequence's first draft has no such token. A wrong source must cost no more than two
further trials, since a short answer has no time to win them back."""

_DOUBT = 0.002
"""The least chance of either outcome: no estimate is certain, since averages are of some hundred
outcomes at most."""

_LEAST_CHANCE = 0.03
"""The least chance of acceptance that is considered: no further row costs so little, and most wrong
drafts end there after a place or two."""

_NEAR_TOKENS = 64
"""Contexts within so many tokens share their costs, so that most steps compute none."""

_TELLING_ROWS = 64
"""Rows of one token from which steps are compute-bound on a machine too slow to measure more."""

_FIRST_REST, _MOST_REST = 16, 128
"""The first and the longest rest of all cheap sources, in steps, after they did not pay: a trial of
as many steps as the first rest then takes a ninth of all steps. The first is also the rest where no
draft could pay."""

_READ_FOR = 512
"""The steps over which the cost of reading a prompt is spread: an answer of some hundreds."""

_FREE = 0.01
"""The share of a step that asking may take without earning it, so that new drafts are found: less
than the step's time varies."""

_Place = tuple[str, float, int | None]
"""A source, one of the places above, and the likelihood in tenths; None without one."""


class Acceptance:
    """Moving averages of the acceptance of each source's drafts, by place and likelihood.

    The averages of a sequence begin with those of all sequences.

    A draft's first tokens are compared with the text whether they were verified or not. So a source
    that failed is still measured, at no cost for the device, and is used again once it is right.
    """

    def __init__(self) -> None:
        self._sources: dict[_Place, float] = {}
        # By row: its averages, and the first place of each source's next draft.
        self._rows: defaultdict[int, tuple[dict[_Place, float], dict[str, float]]] = defaultdict(
            lambda: ({}, {})
        )

    def forget(self, row: int) -> None:
        """The sequence of a row has left."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """All sequences have left; the averages of sources stay."""
        self._rows.clear()

    def expected(self, row: int, draft: Draft) -> list[float]:
        """Return, for each place, the chance that a row's draft is accepted up to there.

        The chances fall, and end where they become negligible.
        """
        own, firsts = self._rows[row]
        where = firsts.get(draft.source, _FIRST)
        chances: list[float] = []
        chance, share, known = 1.0, 0.0, None
        for tenths in _tenths(draft):
            if (where, tenths) != known:
                known = where, tenths
                place = draft.source, where, tenths
                share = own.get(place) or self._of_source(place)
            chance *= share
            if chances and chance < _LEAST_CHANCE:
                break
            chances.append(chance)
            where = _LATER
        return chances

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        """Learn from the tokens of a row in a step.

        Args:
            row: The row.
            draft: Its whole draft, verified or not.
            got: The tokens, in order.
        """
        own, firsts = self._rows[row]
        where = firsts.get(draft.source, _FIRST)
        for drafted, token, tenths in zip(draft.tokens, got, _tenths(draft), strict=False):
            place, right = (draft.source, where, tenths), drafted == token
            own[place] = _moved(own.get(place) or self._of_source(place), right, _NEWEST)
            # All first places tell what to expect of a new sequence.
            shared = {where, _FIRST} if where in (_AFTER_WRONG, _AFTER_RIGHT) else {where}
            for each in shared:
                key = draft.source, each, tenths
                self._sources[key] = _moved(self._of_source(key), right, _NEWEST_OF_SOURCE)
            firsts[draft.source] = _AFTER_RIGHT if right else _AFTER_WRONG
            if not right:
                break
            where = _LATER

    def _of_source(self, place: _Place) -> float:
        _, where, tenths = place
        guess = where if tenths is None else min(max(tenths / 10, _DOUBT), 1 - _DOUBT)
        return self._sources.get(place, guess)


def _moved(average: float, right: bool, weight: float) -> float:
    return min(max(average + weight * (right - average), _DOUBT), 1 - _DOUBT)


def _tenths(draft: Draft) -> Sequence[int | None]:
    """Return the likelihood of each place of a draft in tenths; NaN counts as 0."""
    count = len(draft.tokens)
    known = [round(10 * min(each, 1)) if each > 0 else 0 for each in draft.likelihoods[:count]]
    if len(draft.likelihoods) == 1:
        return known * count
    return known + [None] * (count - len(known))


@dataclass(slots=True)
class DraftLedger:
    """The costs and gains of a source's drafts, in seconds per step.

    A source that costs more than it gains rests for 16 steps, then twice as many each time.

    Attributes:
        most_rest: The longest rest, in steps.
        spent: Average cost.
        saved: Average gain.
        owed: Cost of steps without a draft, which later ones have to earn.
        rest: Steps left to skip.
    """

    most_rest: int
    spent: float = 0.0
    saved: float = 0.0
    owed: float = 0.0
    rest: int = 0
    _judged_in: int = _FIRST_REST
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Return whether to ask the source in this step; counts a step of its rest."""
        if self.rest:
            self.rest -= 1
            return False
        return True

    def settle(self, spent: float, saved: float) -> None:
        """Record a step with a call of the source: its seconds, and those that it saved."""
        self.owed -= self.owed / _READ_FOR
        self.spent += _NEWEST * (spent - self.spent)
        self.saved += _NEWEST * (saved - self.saved)
        self._judge()

    def owe(self, seconds: float) -> None:
        """Record a step that took time and drafted nothing, as a model does that reads a prompt."""
        self.owed += seconds
        # A step without any request takes little time and says nothing about costs.
        if seconds > self.spent:
            self._judge()

    def _judge(self) -> None:
        self._judged_in -= 1
        if self._judged_in > 0:
            return
        if self.saved >= LEAST_GAIN * (self.spent + self.owed / _READ_FOR):
            self._next_rest = _FIRST_REST
            return
        self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, self.most_rest)
        self._judged_in = _FIRST_REST


class CostControl:
    """Verifies the drafted tokens that give the most tokens per second.

    Prompt tokens are due in any case. So a step's own rows cost what they would without them, and a
    drafted row costs what a row costs in a step of that size.

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
        self._num_rows = self._num_prefill = self._num_chosen = self._room = 0
        self._context = 0.0
        # Room, costs and hope are those of the last step of the same kind.
        self._step: tuple[int, int, int, int] | None = None
        self._seconds = costs.at()
        self._is_timed = True
        self._pays = False
        self._ledger = DraftLedger(_MOST_REST)

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        """Begin a step; return whether drafts would pay if they were right.

        Args:
            num_rows: Rows of one token that the step has anyway.
            num_prefill: Tokens of its other rows.
            context: Average tokens before a row of one token.
        """
        self._num_rows, self._num_prefill, self._context = num_rows, num_prefill, context
        self._num_chosen, self._is_timed = 0, False
        near = int(context) // _NEAR_TOKENS
        step = num_rows, num_prefill, near, self.costs.version
        if step != self._step:
            self._step = step
            self._seconds = self.costs.at(near * _NEAR_TOKENS)
            self._room = self._find_room()
            self._pays = self._room > 0 and bool(
                self._gains(np.arange(1, self._room + 1)).max() >= LEAST_GAIN
            )
        return self._pays and not self._ledger.rest

    def rest(self) -> int:
        """Return the steps to skip before drafting again (backoff), after `begin` returned False.
        The caller enforces it."""
        if self._pays:
            rest, self._ledger.rest = self._ledger.rest, 0
            return rest
        # The end of a prompt, or its growth into a larger batch, may change the answer.
        return 0 if self._num_prefill else _FIRST_REST

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens of each draft to verify, for the most tokens per second.

        Args:
            chances: For each draft, the falling chances that a place is reached and accepted.
        """
        lengths = [0] * len(chances)
        if not self._room or not any(chances):
            return lengths
        chance = np.fromiter(itertools.chain.from_iterable(chances), np.float64)
        # NaN is no chance.
        chance = np.where(chance > 0, chance, 0)
        order = np.argsort(-chance, kind="stable")[: self._room]
        gains = self._gains(np.cumsum(chance[order]))
        best = int(gains.argmax())
        if gains[best] < LEAST_GAIN:
            return lengths
        self._num_chosen = best + 1
        drafts = np.repeat(np.arange(len(chances)), [len(falling) for falling in chances])
        counts: list[int] = np.bincount(drafts[order[: best + 1]], minlength=len(chances)).tolist()
        return counts

    def spent(self, seconds: float, num_accepted: int) -> None:
        """Record the end of a step: the time of asking and learning without the draft model's
        passes, and the accepted tokens."""
        took, saved = self.value(self._num_chosen, num_accepted)
        free = _FREE * self._cost(self._num_rows)
        self._ledger.settle(max(seconds - free, 0.0), max(saved - took, 0.0))

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        """Return the value of some drafted tokens of this step, apart from all others.

        Args:
            num_verified: How many of the tokens that `lengths` chose.
            num_accepted: How many of these were accepted.

        Returns:
            Seconds to verify them, and seconds that the accepted ones would take without drafts.
        """
        rows, own = self._others + self._num_chosen, max(self._num_rows, 1)
        took = self._cost(rows) - self._cost(rows - num_verified)
        return took, num_accepted * self._cost(own) / own

    def timed(self, seconds: float) -> None:
        """Record the time of a step up to its tokens: of the last one that began, if any."""
        rows = self._num_rows + self._num_chosen
        if rows and not self._num_prefill and not self._is_timed:
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

    @property
    def _others(self) -> int:
        """The step's rows without drafts. Each row after the largest measured step costs the same,
        so a larger step is treated as that one."""
        return min(self._num_rows + self._num_prefill, self.costs.most_rows)

    def _cost(self, rows: int) -> float:
        return float(self._seconds[min(rows, self._seconds.size - 1)])

    def _gains(self, tokens: npt.NDArray[np.float64 | np.int64]) -> npt.NDArray[np.float64]:
        """Return tokens per second over those without drafts, with 1, 2, … drafted rows.

        `tokens`: `[drafted rows]`, expected accepted tokens.
        """
        own, others = self._cost(self._num_rows), self._others
        drafted = self._seconds[others + 1 : others + tokens.size + 1] - self._seconds[others]
        gains: npt.NDArray[np.float64] = (1 + tokens / self._num_rows) * own / (own + drafted)
        return gains

    def _find_room(self) -> int:
        """Return the most drafted tokens of the step."""
        most_rows, others = self.costs.most_rows, self._num_rows + self._num_prefill
        room = max(self._max_rows - self._num_rows, 0) if self._num_rows else 0
        if others <= most_rows:
            # Beyond the measured sizes other kernels may take over, and a step be far longer.
            return min(room, most_rows - others)
        # Likewise if the measurement ends where steps are still memory-bound.
        return room if most_rows >= _TELLING_ROWS else 0
