"""Draft heads: the target's hidden states are kept for them in each pass."""

from __future__ import annotations

from ..driver.speculation.draft_head import HeadDrafts
from ..driver.step import LaunchedStep
from ..runner.heads.taps import HiddenTaps
from ..runner.interface import StepInputs
from . import ExecutorState, Part


class DraftHeads(Part):
    """The hidden states of each pass, and copies of their blocks."""

    def __init__(self, state: ExecutorState, drafts: HeadDrafts) -> None:
        super().__init__(state)
        self._drafts, self._steps = drafts, state.steps
        self._taps = HiddenTaps(state.runner, drafts.reads)
        # The last states of all tokens are wanted, not only of those with logits.
        self._steps.reads_all = not drafts.reads
        self._steps.watch = self._watch

    def _watch(self, inputs: StepInputs) -> None:
        assert inputs.source is not None
        self._drafts.keep(inputs.source[0], self._taps.states)

    def before(self, step: LaunchedStep) -> None:
        if step.plan.copies:
            self._drafts.copy_blocks(step.plan.copies)

    def close(self) -> None:
        self._taps.remove()
        self._steps.watch = None
