"""What batching tells fairness: places that became free, and who was served."""

from __future__ import annotations

from ...bus.messages import Credit, StepSummary

REPORTED_STEPS = 8
"""Steps after which there is a report although no place became free."""


class Report:
    """Collects until there is something to tell; a step adds one reference, not one per token."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what was not told."""
        self.free_slots = 0
        self._steps: list[tuple[int, ...]] = []
        self._step_ns = 0
        self.started: list[tuple[int, int]] = []
        self.paused: list[int] = []
        self.ended: list[int] = []

    def step(self, result: StepSummary) -> None:
        """A step has come back."""
        if result.seq_ids:
            self._steps.append(result.seq_ids)
            took_ns = result.end_ns - result.start_ns
            self._step_ns = min(self._step_ns or took_ns, took_ns)

    def pause(self, seq_id: int) -> None:
        """A sequence is paused; its place is free."""
        self.paused.append(seq_id)
        self.free_slots += 1

    def leave(self, seq_id: int) -> None:
        """A sequence has ended and left the place that it had."""
        self.ended.append(seq_id)
        self.free_slots += 1

    def take(self, kv_free: int) -> Credit | None:
        """The report; None while nothing needs to be told."""
        waits = len(self._steps) < REPORTED_STEPS
        if waits and not (self.free_slots or self.paused or self.ended):
            return None
        report = Credit(
            self.free_slots,
            tuple(self._steps),
            tuple(self.started),
            tuple(self.paused),
            tuple(self.ended),
            max(0, self._step_ns),
            kv_free,
        )
        self.clear()
        return report
