"""The seconds of steps by their rows: measured when the model is loaded, since the number of rows
from which a step is compute-bound depends on model and machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

MOST_ROWS = 512
"""The most rows of one token in a step, drafted ones included: larger steps would take long to
measure, and leave drafts little to gain."""

_SIZES = (1, 16, 4, 8, 64, 32, 2, 256, 128, 512, 3, 6, 12, 24, 48, 96, 192, 384)
"""Rows of the measured steps, the most telling first."""

_LEAST_SIZES = 4
"""Sizes that are measured whatever they take: with fewer, interpolation may be off by a factor of
two."""

_ROUNDS, _MOST_ROUNDS = 5, 40
"""Measurements of each size: five outlast a disturbance of one or two. Short steps are disturbed
more, so rounds go on up to the second number, within a quarter of the budget."""

_SHORT_CONTEXT, _LONG_CONTEXT, _LONG_ROWS = 64, 1024, 16
"""Contexts of the measured steps, in tokens, and the rows with which the two are compared."""

_NEWEST_PAIR = 0.05
"""The share of two successive steps' difference that is learned: single steps are disturbed by
other load, so a difference counts only if it lasts for tens of steps."""

_MOST_SURPRISE = 0.5
"""The largest difference of two successive steps that is learned, as a logarithm of their ratio: a
larger one is mostly a disturbance."""


class StepCosts:
    """Durations of steps of single-token rows.

    Attributes:
        most_rows: Costs of more rows are extrapolated.
        version: Changes with the costs.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], *, context_s: float = 0.0
    ) -> None:
        """Take measured durations of sizes that rise from 1; between sizes, costs are linear.

        A step that took longer than a larger one was disturbed. `context_s`: the cost of one more
        token of a row's context.

        Raises:
            ValueError: The sizes don't rise from 1, or a duration is not above 0.
        """
        rising = all(left < right for left, right in itertools.pairwise(sizes))
        if len(sizes) != len(seconds) or not rising or not sizes or sizes[0] != 1:
            raise ValueError("the sizes of steps have to rise from 1, with a duration for each")
        if not all(0 < duration < math.inf for duration in seconds):
            raise ValueError("a step's duration has to be above 0")
        self.most_rows = sizes[-1]
        self.version = 0
        self._context_s = context_s
        undisturbed = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
        # With a single size, each further row is assumed to cost as much again.
        slope = undisturbed[0]
        if len(sizes) > 1:
            slope = (undisturbed[-1] - undisturbed[-2]) / (sizes[-1] - sizes[-2])
        self._rows = np.arange(self.most_rows + MOST_ROWS + 1)
        beyond = slope * np.maximum(self._rows - self.most_rows, 0)
        self._measured = np.interp(self._rows, sizes, undisturbed) + beyond
        # The learned cost of a row beside the measured one: at most as much as in the largest step.
        self._row_s = 0.0
        self._most_row_s = float(undisturbed[-1]) / self.most_rows
        self._last: tuple[int, float] | None = None

    def at(self, context: float = _SHORT_CONTEXT) -> npt.NDArray[np.float64]:
        """Return the seconds of steps of 0, 1, … rows with an average context of so many tokens,
        `[most_rows + MOST_ROWS + 1]`. A step takes never less than one with fewer rows."""
        row_s = self._row_s + self._context_s * (context - _SHORT_CONTEXT)
        # A step takes time however short its contexts are.
        seconds = np.maximum(self._measured + row_s * self._rows, self._measured / 2)
        return np.maximum.accumulate(seconds)

    def observe(self, rows: int, seconds: float, context: float = _SHORT_CONTEXT) -> None:
        """Learn from a step of single-token rows, drafted ones included.

        The speed of a machine drifts, so only the ratio of two successive steps with different
        rows is used.
        """
        last, self._last = self._last, None
        if not (1 <= rows <= self.most_rows and 0 < seconds < math.inf):
            return
        cost = self.at(context)
        self._last = rows, seconds / cost[rows]
        if last is None or last[0] == rows:
            return
        surprise = math.log(self._last[1] / last[1])
        surprise = max(-_MOST_SURPRISE, min(surprise, _MOST_SURPRISE))
        row_s = surprise * cost[max(rows, last[0])] / (rows - last[0])
        learned = self._row_s + _NEWEST_PAIR * float(row_s)
        self._row_s = max(-self._most_row_s, min(learned, self._most_row_s))
        self.version += 1

    def interrupt(self) -> None:
        """A step of another kind came between: the next one is compared with none."""
        self._last = None


def measure_costs(
    step: Callable[[int, int], object],
    most_rows: int,
    now_ns: Callable[[], int],
    *,
    longest: int = _LONG_CONTEXT,
    budget_s: float = 1.5,
) -> StepCosts:
    """Measure steps of several sizes in turns, and take the shortest of each: other load can only
    make a step longer.

    Args:
        step: Runs a step of so many rows with a context of so many tokens, to its end.
        most_rows: The largest size.
        longest: The longest context.
        now_ns: The clock.
        budget_s: Approximate time limit. Slow steps are measured at fewer sizes, at least four.
    """
    short, long = min(_SHORT_CONTEXT, longest), min(_LONG_CONTEXT, longest)
    long_rows = min(_LONG_ROWS, most_rows)
    step(1, short)
    begin_ns, budget_ns = now_ns(), budget_s * 1e9
    # By rows and context.
    shortest: dict[tuple[int, int], int] = {}

    def run(size: int, context: int) -> None:
        start_ns = now_ns()
        step(size, context)
        took_ns = max(now_ns() - start_ns, 1)
        shortest[size, context] = min(took_ns, shortest.get((size, context), took_ns))

    steps = [(size, short) for size in _SIZES if size <= most_rows]
    if long > short and (long_rows, short) in steps:
        steps.append((long_rows, long))
    for size, context in steps:
        # A step takes no longer than a larger one, nor longer per row than a smaller one; with a 16
        # times longer context, at most a few times longer.
        bound_ns = min((ns * max(size / rows, 1) for (rows, _), ns in shortest.items()), default=0)
        bound_ns *= 4 if context == long > short else 1
        if len(shortest) < _LEAST_SIZES or now_ns() - begin_ns + bound_ns <= budget_ns / 3:
            run(size, context)
    round_ns = sum(shortest.values())
    for number in range(1, _MOST_ROUNDS):
        limit_ns = budget_ns if number < _ROUNDS else budget_ns / 4
        if now_ns() - begin_ns + round_ns > limit_ns:
            break
        for size, context in sorted(shortest, reverse=number % 2 == 1):
            run(size, context)
    context_s = 0.0
    if long > short and (long_rows, long) in shortest:
        more_ns = shortest[long_rows, long] - shortest[long_rows, short]
        context_s = max(more_ns, 0) * 1e-9 / (long_rows * (long - short))
    sizes = sorted(size for size, context in shortest if context == short)
    return StepCosts(sizes, [shortest[size, short] * 1e-9 for size in sizes], context_s=context_s)
