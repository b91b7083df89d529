"""When drafted tokens are worth their time: what a step costs, by its rows, and how many to verify.

A step takes little longer with two rows than with one where it waits for weights, and twice as long
with twice as many where it is bound by arithmetic. Where that changes depends on model and machine,
so it is measured when the model is loaded.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...runner.interface import InputBuilder, KVCache, LoadedModel, Rows, model_forward
from ..sampling import sample_plain, sample_rows

_SIZES = (1, 16, 4, 8, 64, 32, 2, 256, 128, 512, 3, 6, 12, 24, 48, 96, 192, 384)
"""Rows of the steps that are measured, the most telling first, should time run out."""

_LEAST_SIZES = 4
"""So many are measured however long they take: where fewer are known, what lies between them may
cost twice what it seems to."""

_TELLING_ROWS = 64
"""From so many rows on, steps are bound by arithmetic on a machine that has no time for more."""

_ROUNDS, _MOST_ROUNDS = 5, 40
_ENOUGH = 0.25
"""Share of the budget that more than the first rounds may take: of short steps, many are needed to
see each size undisturbed."""

_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024
_LONG_ROWS = 16
"""Rows of the steps that show what a longer context costs."""

_LEARNING_RATE = 0.05
_LARGEST_SURPRISE = 0.5
_LARGEST_CORRECTION = math.log(2)
_STEPS_A_TABLE = 8

LEAST_GAIN = 1.05
"""Drafts are verified if that gives so many times the tokens per second at least."""


class StepCosts:
    """How long a step of single-token rows takes.

    Attributes:
        most_rows: What is told of more rows is a guess.
        version: Changes when what is told changes.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], *, context_s: float = 0.0
    ) -> None:
        """Takes what was measured: with so many rows, from 1 on and rising, so many seconds.

        Between sizes it is linear. A step that took longer than one with more rows was disturbed.
        `context_s`: what one more token of a row's context costs.

        Raises:
            ValueError: The sizes are none, don't rise from 1, or a duration is not above 0.
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
        # Logarithms of factors, which add up to 0.
        self._corrections = [0.0] * len(sizes)
        self._last: tuple[int, float] | None = None
        self._num_learned = self.version = 0
        self._make_table()

    def at(self, context: float) -> StepCosts:
        """The same, where rows have so many tokens before them on average."""
        per_row = self._context_s * (context - _SHORT_CONTEXT)
        if not per_row:
            return self
        costs = copy.copy(self)
        # A step never takes nothing, however short its rows are.
        least = self._table / 2
        costs._table = np.maximum(self._table + per_row * np.arange(self.most_rows + 1), least)
        costs._slope = max(self._slope + per_row, self._slope / 2)
        return costs

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows; never less than with fewer."""
        if rows <= self.most_rows:
            return float(self._table[max(rows, 1)])
        return float(self._table[-1]) + (rows - self.most_rows) * self._slope

    def beyond(self, rows: int, count: int) -> npt.NDArray[np.float64]:
        """Seconds of steps of 1 to `count` rows more, `[count]`."""
        if rows + count <= self.most_rows:
            return self._table[rows + 1 : rows + count + 1]
        return np.array([self.of(rows + more) for more in range(1, count + 1)])

    def observe(self, rows: int, seconds: float, context: float = _SHORT_CONTEXT) -> None:
        """Learns from a step of single-token rows alone, drafted ones included.

        A machine is faster at one time than at another. So only the ratio of two steps that
        followed one another tells anything, and only where they differ in their rows: it moves the
        costs of these sizes against one another, a little.
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
        """A step of another kind has come between: it is compared with none."""
        self._last = None

    def _correct(self, rows: int, change: float) -> None:
        """Shares a change out among the two sizes between which a step was."""
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
        # A single size says nothing of more rows: each is taken to cost as much again.
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
    """Measures steps of several sizes in turns, and takes the shortest of each: whoever else wants
    the machine can only make a step longer.

    Args:
        step: Runs a step of so many rows with so long a context, and waits for its tokens.
        most_rows: More are not needed.
        longest: Most tokens that a context may have.
        now_ns: The clock.
        budget_s: About how long it may take. Where steps are long, fewer sizes are measured; where
            even the first four take longer, it takes as long as these.
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
    # A context 16 times as long takes a few times as long at most.
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
    """What a step may take at worst: as long as a larger one, or as much for each row."""
    larger = [known for known in durations if known > size]
    if larger:
        return durations[min(larger)][0]
    largest = max(durations)
    return durations[largest][0] * size / largest


def trial_step(
    model: LoadedModel, cache: KVCache, builder: InputBuilder, *, kernels: bool
) -> Callable[[int, int], object]:
    """A step of any number of rows that belong to no sequence, for `measure_costs`.

    It runs the model and samples. Of the KV cache it writes to the padding block alone, and no
    random numbers are drawn. What else a step does for a row is little beside; `StepCosts.observe`
    sees it.

    Args:
        model: One that generates.
        cache: Its KV cache.
        builder: Makes the inputs of its steps.
        kernels: As in `scale_logits`.
    """

    @torch.inference_mode()
    def step(count: int, context: int) -> list[int]:
        ones = np.ones(count, np.int64)
        width = -(-context // cache.block_size)
        rows = Rows((context - 1) * ones, ones, np.full((count, width), cache.padding_block), count)
        # Different tokens, since an expert that all rows have chosen would be read only once.
        ids = np.arange(count) * 7919 % model.vocab_size
        inputs = builder.build(rows, ids, np.arange(count))
        logits = model_forward(model.module, inputs, cache)
        temperatures = torch.ones(count, device=logits.device)
        numbers = torch.full_like(temperatures, 0.5, dtype=torch.float64)
        if logits.device.type == "cuda":
            tokens, _ = sample_plain(logits, temperatures, numbers)
        else:
            tokens, _ = sample_rows(logits, temperatures, uniforms=numbers, kernels=kernels)
        return tokens.tolist()

    return step


def may_pay(
    num_rows: int,
    costs: StepCosts,
    *,
    max_rows: int,
    num_prefill: int = 0,
    drafting_s: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> bool:
    """Whether some number of drafted tokens, all of them right, would be worth their time.

    The arguments are those of `choose_lengths`, and `drafting_s`, what it takes to have drafts:
    it has to be earned too.
    """
    room = _room(num_rows, num_prefill, costs, max_rows)
    if num_rows < 1 or room < 1:
        return False
    others = num_rows + num_prefill
    seconds = costs.of(num_rows) - costs.of(others) + costs.beyond(others, room) + drafting_s
    rates = (num_rows + np.arange(1, room + 1)) / seconds
    return bool(rates.max() >= least_gain * num_rows / costs.of(num_rows))


def _room(num_rows: int, num_prefill: int, costs: StepCosts, max_rows: int) -> int:
    """How many drafted tokens a step can have."""
    others = num_rows + num_prefill
    room = max_rows - num_rows
    if others <= costs.most_rows:
        # Who knows what happens beyond: where other kernels take over, a step may be far longer.
        return min(room, costs.most_rows - others)
    # The same, if what was measured ends where steps still wait for weights.
    return room if costs.most_rows >= _TELLING_ROWS else 0


def choose_lengths(
    num_rows: int,
    chances: Sequence[Sequence[float]],
    costs: StepCosts,
    *,
    max_rows: int,
    num_prefill: int = 0,
    least_gain: float = LEAST_GAIN,
) -> list[int]:
    """How many tokens of each draft to verify, for the most tokens in the time that they take.

    The likeliest places come first, whosever they are: of so many, no others give more tokens.

    Tokens of prompts that are computed in the same step are work that is due in any case, and worth
    what it takes. So the step's own rows cost what they would without these, and a drafted row what
    a row costs in a step that is so large.

    Args:
        num_rows: Rows of one token that the step has in any case.
        chances: Of each draft, that a place is reached and accepted; none above the one before.
        costs: Of steps.
        max_rows: Most rows of one token, drafted ones included.
        num_prefill: Tokens of prompts that are computed besides.
        least_gain: Nothing is verified for less than so many times the tokens per second.

    Returns:
        `[drafts]`; 0 for a draft of which nothing is worth verifying.
    """
    lengths = [0] * len(chances)
    others = num_rows + num_prefill
    room = _room(num_rows, num_prefill, costs, max_rows)
    if num_rows < 1 or room < 1 or not any(chances):
        return lengths
    chance = np.fromiter(itertools.chain.from_iterable(chances), np.float64)
    # What is no number is no chance.
    chance = np.where(chance > 0, chance, 0)
    order = np.argsort(-chance, kind="stable")[:room]
    if not order.size:
        return lengths
    tokens = num_rows + np.cumsum(chance[order])
    seconds = costs.of(num_rows) - costs.of(others) + costs.beyond(others, order.size)
    rates = tokens / seconds
    best = int(rates.argmax())
    if rates[best] < least_gain * num_rows / costs.of(num_rows):
        return lengths
    drafts = np.repeat(np.arange(len(chances)), [len(falling) for falling in chances])
    counts: list[int] = np.bincount(drafts[order[: best + 1]], minlength=len(chances)).tolist()
    return counts
