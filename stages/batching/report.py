"""Reports of the batching core to fairness, and counts for telemetry."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...bus.messages import Credit
from ...bus.steps import StepSummary

REPORTED_STEPS = 8
"""Steps after which a report is due although no place is free."""


@dataclass
class Report:
    """A Credit message in the making; a step adds one reference, not one per token.

    Attributes:
        free_slots: Places that have become free.
        steps, started, paused, ended, left: As in Credit.
        step_ns: Duration of the shortest step; 0 before the first.
    """

    free_slots: int = 0
    steps: list[tuple[int, ...]] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    step_ns: int = 0

    @property
    def is_due(self) -> bool:
        """Whether a place is free, a sequence has left, or many steps have come back."""
        left = self.free_slots or self.paused or self.ended or self.left
        return bool(left) or len(self.steps) >= REPORTED_STEPS

    def add_step(self, result: StepSummary) -> None:
        """Add a step that has come back."""
        if result.seq_ids:
            self.steps.append(result.seq_ids)
            took_ns = result.end_ns - result.start_ns
            self.step_ns = min(self.step_ns or took_ns, took_ns)

    def pause(self, seq_id: int) -> None:
        """Add a sequence that has paused and freed its place."""
        self.paused.append(seq_id)
        self.free_slots += 1

    def end(self, seq_id: int, *, ended: bool = True) -> None:
        """Add a sequence that has freed its place, because it has ended or was handed over."""
        (self.ended if ended else self.left).append(seq_id)
        self.free_slots += 1

    def message(self, kv_free: int) -> Credit:
        """Return the message for fairness."""
        return Credit(
            sequences=self.free_slots,
            steps=tuple(self.steps),
            started=tuple(self.started),
            paused=tuple(self.paused),
            ended=tuple(self.ended),
            step_ns=max(0, self.step_ns),
            kv_free=kv_free,
            left=tuple(self.left),
        )


@dataclass
class Counters:
    """Counts since the last `BatchingCore.take_counters`.

    Attributes:
        prefilled: Planned tokens of prompts, and of tokens computed again.
        decoded: Planned rows that compute one token each.
        cached: Tokens that needed no computing.
        recomputed: Prefilled tokens whose KV a preemption or a failure had lost.
        wasted: Tokens computed for sequences that had ended.
        full_hits: Sequences that started with all tokens cached but the last, which is always
            computed; or with a shared prefill.
        partial_hits: Sequences that started with some tokens cached.
        misses: Sequences that started with none.
        preemptions: Sequences that gave up their blocks for others.
        resumes: Sequences that started after tokens that they had generated before.
    """

    prefilled: int = 0
    decoded: int = 0
    cached: int = 0
    recomputed: int = 0
    wasted: int = 0
    full_hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    preemptions: int = 0
    resumes: int = 0

    def count_start(self, num_tokens: int, num_cached: int, *, resumes: bool) -> None:
        """Count a sequence that starts; `resumes`: after a preemption or a failure."""
        self.cached += num_cached
        if not num_cached:
            self.misses += 1
        elif num_cached < num_tokens - 1:
            self.partial_hits += 1
        else:
            self.full_hits += 1
        if resumes:
            self.resumes += 1
            self.recomputed += num_tokens - num_cached
