"""The costs of steps by their rows, and from them the number of drafted tokens to verify.

A memory-bound step takes little longer with two rows than with one; a compute-bound step takes
twice as long with twice the rows. The transition depends on model and machine, so it is measured
when the model is loaded.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_SIZES = (1, 16, 4, 8, 64, 32, 2, 256, 128, 512, 3, 6, 12, 24, 48, 96, 192, 384)
"""Rows of the measured steps, the most telling first."""

_LEAST_SIZES = 4
"""Sizes that are measured whatever they take: with fewer, interpolation may be off by a factor of
two."""

_TELLING_ROWS = 64
"""Rows from which steps are compute-bound on a machine too slow to measure more."""

_ROUNDS, _MOST_ROUNDS = 5, 40
_ENOUGH = 0.25
"""Share of the budget for extra rounds: short steps need many to measure each size undisturbed."""

_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024
_LONG_ROWS = 16
"""Rows of the steps that measure a longer context."""

_LEARNING_RATE = 0.05
_LARGEST_SURPRISE = 0.5
_LARGEST_CORRECTION = math.log(2)
_STEPS_A_TABLE = 8

LEAST_GAIN = 1.05
"""The least gain in tokens per second for which drafts are verified."""


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
        self._context_s = context_s
        self._sizes = list(sizes)
        self._measured = np.log(seconds)
        # Logarithms of factors; they sum to 0.
        self._corrections = [0.0] * len(sizes)
        self._last: tuple[int, float] | None = None
        self._num_learned = self.version = 0
        self._make_table()

    def at(self, context: float) -> StepCosts:
        """Return the costs at an average context of so many tokens."""
        per_row = self._context_s * (context - _SHORT_CONTEXT)
        if not per_row:
            return self
        costs = copy.copy(self)
        # A step takes time however short its contexts are.
        least = self._table / 2
        costs._table = np.maximum(self._table + per_row * np.arange(self.most_rows + 1), least)
        costs._slope = max(self._slope + per_row, self._slope / 2)
        return costs

    def of(self, rows: int) -> float:
        """Return the seconds of a step; never less than with fewer rows."""
        if rows <= self.most_rows:
            return float(self._table[max(rows, 1)])
        return float(self._table[-1]) + (rows - self.most_rows) * self._slope

    def beyond(self, rows: int, count: int) -> npt.NDArray[np.float64]:
        """Return the seconds of steps of 1 to `count` more rows, `[count]`."""
        if rows + count <= self.most_rows:
            return self._table[rows + 1 : rows + count + 1]
        return np.array([self.of(rows + more) for more in range(1, count + 1)])

    def observe(self, rows: int, seconds: float, context: float = _SHORT_CONTEXT) -> None:
        """Learn from a step of single-token rows, drafted ones included.

        The speed of a machine drifts, so only the ratio of two successive steps with different
        rows is used: it moves the costs of these sizes against one another, a little.
        """
        if not (1 <= rows <= self.most_rows and 0 < seconds < math.inf):
            self._last = None
            return
        last = self._last
        self._last = rows, math.log(seconds / self.at(context).of(rows))
        if last is None or last[0] == rows:
            return
        surprise = self._last[1] - last[1]
        surprise = max(-_LARGEST_SURPRISE, min(surprise, _LARGEST_SURPRISE))
        self._correct(rows, _LEARNING_RATE * surprise)
        self._correct(last[0], -_LEARNING_RATE * surprise)
        self._num_learned += 1
        if self._num_learned % _STEPS_A_TABLE == 0:
            self._make_table()

    def interrupt(self) -> None:
        """A step of another kind came between: the next one is compared with none."""
        self._last = None

    def _correct(self, rows: int, change: float) -> None:
        """Distribute a change over the two sizes around a step."""
        above = bisect_right(self._sizes, rows)
        if above == len(self._sizes):
            shares = [(above - 1, 1.0)]
        else:
            left, right = self._sizes[above - 1 : above + 1]
            share = (rows - left) / (right - left)
            shares = [(above - 1, 1 - share), (above, share)]
        for index, share in shares:
            corrected = self._corrections[index] + share * change
            bounded = max(-_LARGEST_CORRECTION, min(corrected, _LARGEST_CORRECTION))
            self._corrections[index] = bounded

    def _make_table(self) -> None:
        self.version += 1
        seconds = np.exp(self._measured + self._corrections)
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        rows = np.arange(self.most_rows + 1)
        self._table: npt.NDArray[np.float64] = np.interp(rows, self._sizes, seconds)
        # With a single size, each further row is assumed to cost as much again.
        self._slope = float(seconds[0])
        if len(seconds) > 1:
            self._slope = float(seconds[-1] - seconds[-2]) / (self._sizes[-1] - self._sizes[-2])


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
    begin_ns = now_ns()
    budget_ns = budget_s * 1e9
    durations: dict[int, list[int]] = {}
    longer: list[int] = []

    def timed(size: int, context: int) -> int:
        start_ns = now_ns()
        step(size, context)
        return max(now_ns() - start_ns, 1)

    def run(size: int) -> None:
        durations.setdefault(size, []).append(timed(size, short))
        if size == long_rows and longer:
            longer.append(timed(size, long))

    for size in (size for size in _SIZES if size <= most_rows):
        spent_ns = now_ns() - begin_ns
        if len(durations) < _LEAST_SIZES or spent_ns + _at_most(size, durations) <= budget_ns / 3:
            run(size)
    # A 16 times longer context takes at most a few times longer.
    if long > short and 4 * durations.get(long_rows, [budget_ns])[0] <= budget_ns / 3:
        longer.append(timed(long_rows, long))
    round_ns = sum(times[0] for times in (*durations.values(), longer) if times)
    for number in range(1, _MOST_ROUNDS):
        limit_ns = budget_ns if number < _ROUNDS else _ENOUGH * budget_ns
        if now_ns() - begin_ns + round_ns > limit_ns:
            break
        for size in sorted(durations, reverse=number % 2 == 1):
            run(size)
    sizes = sorted(durations)
    context_s = 0.0
    if longer and long_rows in durations:
        more_ns = min(longer) - min(durations[long_rows])
        context_s = max(more_ns, 0) * 1e-9 / (long_rows * (long - short))
    seconds = [min(durations[size]) * 1e-9 for size in sizes]
    return StepCosts(sizes, seconds, context_s=context_s)


def _at_most(size: int, durations: dict[int, list[int]]) -> float:
    """Return an upper bound for a step: a larger step, or the same time per row."""
    larger = [known for known in durations if known > size]
    if larger:
        return durations[min(larger)][0]
    largest = max(durations)
    return durations[largest][0] * size / largest


class StepLoad(NamedTuple):
    """What a step computes without drafted tokens.

    Prompt tokens are due in any case. So the step's own rows cost what they would without them, and
    a drafted row costs what a row costs in a step of that size.

    Attributes:
        num_rows: Rows of one token.
        num_prefill: Prompt tokens.
        costs: Of steps.
        max_rows: The most rows of one token, drafted ones included.
    """

    num_rows: int
    num_prefill: int
    costs: StepCosts
    max_rows: int

    def pays(self, drafting_s: float = 0.0) -> bool:
        """Return whether any number of correct drafted tokens would pay.

        `drafting_s` is the time of drafting, which adds to the cost.
        """
        room = self._room()
        if self.num_rows < 1 or room < 1:
            return False
        rates = (self.num_rows + np.arange(1, room + 1)) / (self._seconds(room) + drafting_s)
        return bool(rates.max() >= LEAST_GAIN * self.num_rows / self.costs.of(self.num_rows))

    def lengths(
        self, chances: Sequence[Sequence[float]], least_gain: float = LEAST_GAIN
    ) -> list[int]:
        """Return how many tokens of each draft to verify, for the most tokens per second.

        The likeliest places of all drafts come first.

        Args:
            chances: For each draft, the falling chances that a place is reached and accepted.
            least_gain: The least gain in tokens per second.

        Returns:
            `[drafts]`; 0 for a draft that is not worth verifying.
        """
        lengths = [0] * len(chances)
        room = self._room()
        if self.num_rows < 1 or room < 1 or not any(chances):
            return lengths
        chance = np.fromiter(itertools.chain.from_iterable(chances), np.float64)
        # NaN is no chance.
        chance = np.where(chance > 0, chance, 0)
        order = np.argsort(-chance, kind="stable")[:room]
        rates = (self.num_rows + np.cumsum(chance[order])) / self._seconds(order.size)
        best = int(rates.argmax())
        if rates[best] < least_gain * self.num_rows / self.costs.of(self.num_rows):
            return lengths
        drafts = np.repeat(np.arange(len(chances)), [len(falling) for falling in chances])
        counts: list[int] = np.bincount(drafts[order[: best + 1]], minlength=len(chances)).tolist()
        return counts

    def _seconds(self, count: int) -> npt.NDArray[np.float64]:
        """Return the time of the rows with 1 to `count` drafted ones, `[count]`."""
        costs, others = self.costs, self.num_rows + self.num_prefill
        return costs.of(self.num_rows) - costs.of(others) + costs.beyond(others, count)

    def _room(self) -> int:
        """Return the most drafted tokens."""
        costs, others = self.costs, self.num_rows + self.num_prefill
        room = self.max_rows - self.num_rows
        if others <= costs.most_rows:
            # Beyond the measured sizes other kernels may take over, and a step be far longer.
            return min(room, costs.most_rows - others)
        # Likewise if the measurement ends where steps are still memory-bound.
        return room if costs.most_rows >= _TELLING_ROWS else 0
