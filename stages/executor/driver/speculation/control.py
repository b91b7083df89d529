"""Whether drafts are worth the time that it takes to have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import Acceptance
from .costs import LEAST_GAIN, StepCosts, choose_lengths, may_pay
from .drafts import Draft

_LEDGER_WEIGHT = 0.1
"""Of the newest step, in the averages."""

_TRIAL_STEPS = 16
"""So many steps are not judged, the first time and after each rest."""

_FIRST_REST = 16

_READ_FOR = 256
"""What reading prompts takes is spread over about so many steps with drafts."""


@dataclass(slots=True)
class DraftLedger:
    """What the drafts of a source took and what they saved, in seconds, step by step.

    Where they take more than they save, the source is not asked for 16 steps, and for twice as many
    each time that happens again.

    Attributes:
        most_rest: For so many steps at most.
        spent: Average of what its drafts took, with a part of what steps without a draft did.
        saved: Average of what they saved.
    """

    most_rest: int
    spent: float = 0.0
    saved: float = 0.0
    _owed: float = 0.0
    _judged_in: int = _TRIAL_STEPS
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Whether the source is to be asked in the step that begins."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    @property
    def rests(self) -> bool:
        """Whether the source is not to be asked."""
        return self._rest > 0

    def take_rest(self) -> int:
        """In so many steps the source is not to be asked, which the caller sees to."""
        rest, self._rest = self._rest, 0
        return rest

    def settle(self, spent: float, saved: float, *, least_gain: float) -> None:
        """A step is over for which the source was asked.

        Args:
            spent: In it.
            saved: In it.
            least_gain: So many times what is spent has to be saved.
        """
        part = self._owed / _READ_FOR
        self._owed -= part
        self.spent += _LEDGER_WEIGHT * (spent + part - self.spent)
        self.saved += _LEDGER_WEIGHT * (saved - self.saved)
        self._judge(self.spent, least_gain)

    def owe(self, seconds: float, *, least_gain: float) -> None:
        """A step is over in which the source took so long and drafted nothing, as a model does
        while it reads a prompt: the drafts that come have to earn that too."""
        self._owed += seconds
        # One in which no sequence wanted a draft takes next to nothing, and shows nothing.
        if seconds > self.spent:
            # The average has parts of what is owed already.
            self._judge(max(self.spent, self._owed / _READ_FOR), least_gain)

    def _judge(self, spent: float, least_gain: float) -> None:
        self._judged_in -= 1
        if self._judged_in > 0:
            return
        if self.saved >= least_gain * spent:
            self._next_rest = _FIRST_REST
            return
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, self.most_rest)
        self._judged_in = _TRIAL_STEPS


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
