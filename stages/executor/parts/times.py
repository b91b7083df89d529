"""Accounts of time: causes of the times of a step."""

from __future__ import annotations

from itertools import compress

from ....bus.times import StepTimes
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import Part


class Times(Part):
    """Completes the times of a plan to those of its result. The last part, after drafts."""

    reads = StepTimes

    def apply(self, section: StepTimes, step: LaunchedStep) -> None:
        step.times = section

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        plan = step.plan
        times = step.times or StepTimes(len(plan.seq_ids))  # without a section all rows are decodes
        first = times.num_decodes
        prefills: tuple[tuple[int, int], ...] = ()
        if first < len(plan.seq_ids):
            others = zip(plan.seq_ids[first:], plan.num_tokens[first:], strict=True)
            prefills = tuple(compress(others, step.runs[first:]))
        step.parts.append(
            StepTimes(0, step.num_computed, prefills, times.held_ns, step.changed_ns, times.left)
        )
