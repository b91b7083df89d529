"""What costs and chances say together: how much of which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import Acceptance
from .costs import StepCosts, choose_lengths
from .drafts import Draft

MOST_ROWS = 64
"""Of one token, drafted ones included: more drafts in a step are not thought of."""


class CostControl:
    """The DraftControl that verifies what gives the most tokens per second."""

    def __init__(self, costs: StepCosts, *, max_rows: int = MOST_ROWS) -> None:
        """For a lane whose steps cost so much, and have at most so many rows of one token."""
        self.costs = costs
        self._acceptance = Acceptance()
        self._max_rows = max_rows
        # Of the step that is under way; 0 where its time says nothing.
        self._num_rows = 0

    def add(self, row: int) -> None:
        """As DraftControl says, like the rest."""
        self._acceptance.begin(row)

    def expected(self, row: int, draft: Draft) -> list[float]:
        return self._acceptance.expected(row, draft)

    def lengths(
        self, num_rows: int, num_prefill: int, chances: Sequence[Sequence[float]]
    ) -> list[int]:
        lengths = choose_lengths(
            num_rows, chances, self.costs, max_rows=self._max_rows, num_prefill=num_prefill
        )
        self._num_rows = 0 if num_prefill else num_rows + sum(lengths)
        return lengths

    def timed(self, seconds: float) -> None:
        """How long the step took whose `lengths` were chosen last, if that was not asked before."""
        if self._num_rows:
            self.costs.observe(self._num_rows, seconds)
        else:
            self.costs.interrupt()
        self._num_rows = 0

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        self._acceptance.settle(row, draft, got)

    def forget(self, row: int) -> None:
        self._acceptance.forget(row)

    def clear(self) -> None:
        self._acceptance.clear()
