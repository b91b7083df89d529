"""Steps of several kinds of rows of one executor, in turns, and what their ratios say."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence

from nano_inference.bus.messages import NewSequence, StepPlan
from nano_inference.stages.executor.core import ExecutorCore


class Turns:
    """The steps of one executor, each of rows of one kind.

    Attributes:
        ids: Of each kind the sequences.
    """

    def __init__(self, core: ExecutorCore) -> None:
        self.ids: dict[str, tuple[int, ...]] = {}
        self._core = core
        self._steps = itertools.count(1)

    def run(
        self,
        kind: str,
        num_tokens: int,
        new: tuple[NewSequence, ...] = (),
        finished: tuple[int, ...] = (),
    ) -> None:
        """A step in which each row of a kind computes so many tokens, and samples one."""
        rows = len(self.ids[kind])
        result = self._core.execute(
            StepPlan(
                step_id=next(self._steps),
                new=new,
                seq_ids=self.ids[kind],
                num_tokens=(num_tokens,) * rows,
                grown=(),
                copies=(),
                finished=finished,
                ended=(),
                made_ns=0,
            )
        )
        if len(result.token_ids) != rows or any(result.finish_reasons):
            raise AssertionError(f"{kind}: {result.finish_reasons}")


def orders(kinds: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Each kind is as often behind each other."""
    return itertools.cycle(itertools.permutations(kinds))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, in 95 of 100 samples like this one (bootstrap)."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[-26]
