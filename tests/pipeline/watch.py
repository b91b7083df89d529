"""Records the plans of an engine, and the work of planning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from nano_inference import InferenceEngine
from nano_inference.bus.steps import StepPlan, StepResult


@dataclass
class Watch:
    """Counts from the plans of an engine.

    Attributes:
        steps: Plans that computed something.
        computed: Tokens that went through the model.
        widest: Most rows of one step.
        cached: For each sequence, leading tokens found when it first started.
        starts: By sequence, in the order of the first, how often it started; once more for each
            preemption.
        longest_loop: Most preemptions of one sequence with no token sampled in between.
        looks: For each plan, at how many waiting sequences it looked.
        order: Sequences in the order in which they ended.
    """

    steps: int = 0
    computed: int = 0
    widest: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    longest_loop: int = 0
    looks: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    _fruitless: Counter[int] = field(default_factory=Counter)

    @property
    def preempted(self) -> int:
        """The number of times that a sequence gave up its blocks."""
        return self.starts.total() - len(self.starts)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        self.steps += bool(plan.seq_ids)
        self.computed += sum(plan.num_tokens)
        self.widest = max(self.widest, len(plan.seq_ids))
        for new in plan.new:
            self.cached.setdefault(new.seq_id, new.num_cached)
            self.starts[new.seq_id] += 1
            if self.starts[new.seq_id] > 1:
                self._fruitless[new.seq_id] += 1
                self.longest_loop = max(self.longest_loop, self._fruitless[new.seq_id])
        for seq_id, reason in zip(result.seq_ids, result.finish_reasons, strict=True):
            self._fruitless[seq_id] = 0
            if reason:
                self.order.append(seq_id)


def watch(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Starts watching; undone by monkeypatch."""
    seen = Watch()
    execute, plan, match = (
        engine._executor.execute,
        engine._batching.plan,
        engine._batching.cache.match,
    )

    def watched_execute(planned: StepPlan) -> StepResult:
        result = execute(planned)
        seen.see(planned, result)
        return result

    def watched_plan(now_ns: int) -> StepPlan | None:
        seen.looks.append(0)
        return plan(now_ns)

    def watched_match(lease):  # type: ignore[no-untyped-def]
        seen.looks[-1] += 1
        return match(lease)

    monkeypatch.setattr(engine._executor, "execute", watched_execute)
    monkeypatch.setattr(engine._batching, "plan", watched_plan)
    monkeypatch.setattr(engine._batching.cache, "match", watched_match)
    return seen
