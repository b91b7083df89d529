"""What costs and chances say together: how much of which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import Acceptance
from .costs import LEAST_GAIN, StepCosts, choose_lengths, may_pay
from .drafts import Draft
from .ledger import DraftLedger

MOST_ROWS = 512
"""Of one token, drafted ones included: more drafts in a step are not thought of."""

_NEAR = 64
_WEIGHT = 0.05
_FIRST_ASKING_S = 8e-6

_FREE = 0.01
"""What asking takes of a step, in shares of it, that need not be earned: a sequence for which there
may be drafts is then found at once."""

_MOST_REST = 128
"""Steps in which nobody is asked, because it has not paid."""

_HOPELESS_STEPS = 16
"""The same where no draft could pay in a step with as many rows."""


class CostControl:
    """The DraftControl that verifies what gives the most tokens per second."""

    def __init__(self, costs: StepCosts, *, max_rows: int = MOST_ROWS) -> None:
        """For a lane whose steps cost so much, and have at most so many rows of one token."""
        self.costs = costs
        self._acceptance = Acceptance()
        self._max_rows = max_rows
        # Of the step that is under way. Of one that has prompts too the time says nothing.
        self._num_rows = self._num_prefill = self._num_chosen = 0
        self._is_timed = True
        self._pays = False
        self._context = 0.0
        self._costs_now = costs
        # Of a row, what asking and learning takes; before anybody knows, what it takes on a CPU.
        self._asking_s = _FIRST_ASKING_S
        self._ledger = DraftLedger(_MOST_REST)
        # What was found out with one version of the costs, by contexts and kinds of steps.
        self._version = costs.version
        self._at: dict[int, StepCosts] = {}
        self._may_pay: dict[tuple[int, int, int], bool] = {}

    def add(self, row: int) -> None:
        """As DraftControl says, like the rest."""
        self._acceptance.begin(row)

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        self._num_rows, self._num_prefill, self._context = num_rows, num_prefill, context
        self._num_chosen, self._is_timed = 0, False
        if self.costs.version != self._version:
            self._version = self.costs.version
            self._at.clear()
            self._may_pay.clear()
        # Costs hardly change within so many tokens.
        near = int(context) // _NEAR
        if near not in self._at:
            self._at[near] = self.costs.at(near * _NEAR)
        self._costs_now = self._at[near]
        step = num_rows, num_prefill, near
        if step not in self._may_pay:
            self._may_pay[step] = may_pay(
                num_rows,
                self._costs_now,
                max_rows=self._max_rows,
                num_prefill=num_prefill,
                drafting_s=self._asking_s * num_rows,
            )
        self._pays = self._may_pay[step]
        return self._pays and not self._ledger.rests

    def rest(self) -> int:
        if self._pays:
            return self._ledger.take_rest()
        # With a prompt less, or when that has grown into a larger batch, it may be otherwise.
        return 0 if self._num_prefill else _HOPELESS_STEPS

    def expected(self, row: int, draft: Draft) -> list[float]:
        return self._acceptance.expected(row, draft)

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        lengths = choose_lengths(
            self._num_rows,
            chances,
            self._costs_now,
            max_rows=self._max_rows,
            num_prefill=self._num_prefill,
        )
        self._num_chosen = sum(lengths)
        self._num_rows += self._num_chosen
        return lengths

    def spent(self, num_asked: int, seconds: float, num_accepted: int) -> None:
        if num_asked:
            self._asking_s += _WEIGHT * (seconds / num_asked - self._asking_s)
        took, saved = self.value(self._num_chosen, num_accepted)
        free = _FREE * self._costs_now.of(self._num_rows - self._num_chosen)
        self._ledger.settle(max(seconds - free, 0.0), max(saved - took, 0.0), least_gain=LEAST_GAIN)

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        # `lengths` has added what was chosen to the rows.
        costs, rows = self._costs_now, self._num_rows + self._num_prefill
        own = max(self._num_rows - self._num_chosen, 1)
        took = costs.of(rows) - costs.of(rows - num_verified)
        return took, num_accepted * costs.of(own) / own

    def timed(self, seconds: float) -> None:
        if self._num_rows and not self._num_prefill and not self._is_timed:
            self.costs.observe(self._num_rows, seconds, self._context)
        else:
            self.costs.interrupt()
        self._is_timed = True

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        self._acceptance.settle(row, draft, got)

    def forget(self, row: int) -> None:
        self._acceptance.forget(row)

    def clear(self) -> None:
        self._acceptance.clear()
        # The step that is under way may have failed, and will not be timed.
        self._is_timed = True
        self.costs.interrupt()
