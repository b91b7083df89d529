"""When drafted tokens are worth their time: what a step costs, by its rows, and how many to verify.

A step takes little longer with two rows than with one where it waits for weights, and twice as long
with twice as many where it is bound by arithmetic. Where that changes depends on model and machine,
so it is measured when the model is loaded.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt
import torch

from ..batch import Rows
from ..inputs import InputBuilder, model_forward
from ..kv_cache import KVCache
from ..loaded_model import LoadedModel
from ..sampling import sample_plain, sample_with_logprobs

_SIZES = (1, 16, 4, 64, 8, 32, 2, 3, 6, 12, 24, 48, 128, 96, 256, 192)
"""Rows of the steps that are measured, the most telling first, should time run out."""

_ROUNDS = 5
_CONTEXT_TOKENS = 256
_LEARNING_RATE = 0.05
_LARGEST_SURPRISE = 0.5
_LARGEST_CORRECTION = math.log(2)
_STEPS_A_TABLE = 8


class StepCosts:
    """How long a step of single-token rows takes.

    Attributes:
        most_rows: What is told of more rows is a guess.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes what was measured: with so many rows, from 1 on and rising, so many seconds.

        Between sizes it is linear. A step that took longer than one with more rows was disturbed.

        Raises:
            ValueError: The sizes are none, don't rise from 1, or a duration is not above 0.
        """
        rising = all(left < right for left, right in itertools.pairwise(sizes))
        if len(sizes) != len(seconds) or not rising or not sizes or sizes[0] != 1:
            raise ValueError("the sizes of steps have to rise from 1, with a duration for each")
        if not all(0 < duration < math.inf for duration in seconds):
            raise ValueError("a step's duration has to be above 0")
        self.most_rows = sizes[-1]
        self._sizes = list(sizes)
        self._measured = np.log(seconds)
        # Logarithms of factors, which add up to 0.
        self._corrections = [0.0] * len(sizes)
        self._last: tuple[int, float] | None = None
        self._num_learned = 0
        self._make_table()

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

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a step of single-token rows alone, drafted ones included.

        A machine is faster at one time than at another, and longer contexts make all steps longer.
        So only the ratio of two steps that followed one another tells anything, and only where
        they differ in their rows: it moves the costs of these sizes against one another, a little.
        """
        if not (1 <= rows <= self.most_rows and 0 < seconds < math.inf):
            self._last = None
            return
        last = self._last
        self._last = rows, math.log(seconds / self._table[rows])
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
        seconds = np.exp(self._measured + self._corrections)
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        rows = np.arange(self.most_rows + 1)
        self._table: npt.NDArray[np.float64] = np.interp(rows, self._sizes, seconds)
        # A single size says nothing of more rows: each is taken to cost as much again.
        self._slope = float(seconds[0])
        if len(seconds) > 1:
            self._slope = float(seconds[-1] - seconds[-2]) / (self._sizes[-1] - self._sizes[-2])


def measure_costs(
    step: Callable[[int], object],
    most_rows: int,
    now_ns: Callable[[], int],
    *,
    budget_s: float = 1.5,
) -> StepCosts:
    """Measures steps of several sizes in turns, and takes the median of each.

    Args:
        step: Runs a step of so many rows, and waits for its tokens.
        most_rows: More are not needed.
        now_ns: The clock.
        budget_s: About how long it may take. Where steps are long, fewer sizes are measured; where
            even two take longer, it takes as long as these.
    """
    step(1)
    begin_ns = now_ns()
    budget_ns = budget_s * 1e9
    durations: dict[int, list[int]] = {}

    def run(size: int) -> None:
        start_ns = now_ns()
        step(size)
        durations.setdefault(size, []).append(max(now_ns() - start_ns, 1))

    for size in (size for size in _SIZES if size <= most_rows):
        spent_ns = now_ns() - begin_ns
        if len(durations) < 2 or spent_ns + _at_most(size, durations) <= budget_ns / 3:
            run(size)
    round_ns = sum(times[0] for times in durations.values())
    for number in range(1, _ROUNDS):
        if now_ns() - begin_ns + round_ns > budget_ns:
            break
        for size in sorted(durations, reverse=number % 2 == 1):
            run(size)
    sizes = sorted(durations)
    return StepCosts(sizes, [median_low(durations[size]) * 1e-9 for size in sizes])


def _at_most(size: int, durations: dict[int, list[int]]) -> float:
    """What a step may take at worst: as long as a larger one, or as much for each row."""
    larger = [known for known in durations if known > size]
    if larger:
        return durations[min(larger)][0]
    largest = max(durations)
    return durations[largest][0] * size / largest


def trial_step(
    model: LoadedModel, cache: KVCache, builder: InputBuilder, *, kernels: bool
) -> Callable[[int], object]:
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
    context = min(_CONTEXT_TOKENS, model.max_model_len)
    width = -(-context // cache.block_size)

    @torch.inference_mode()
    def step(count: int) -> list[int]:
        ones = np.ones(count, np.int64)
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
            tokens, _ = sample_with_logprobs(
                logits, temperatures, uniforms=numbers, kernels=kernels
            )
        return tokens.tolist()

    return step


def choose_lengths(
    num_rows: int,
    chances: Sequence[Sequence[float]],
    costs: StepCosts,
    *,
    max_rows: int,
    num_prefill: int = 0,
    least_gain: float = 1.05,
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
    room = max_rows - num_rows
    if others <= costs.most_rows:
        # Who knows what happens beyond: where other kernels take over, a step may be far longer.
        room = min(room, costs.most_rows - others)
    if num_rows < 1 or room < 1:
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
