"""Draft heads: the target's hidden states are kept for them, and updates reach them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ....config import ModelError, WeightsError
from ..driver.speculation.draft_head import HeadDrafts
from ..driver.step import LaunchedStep
from ..runner.heads.head import DraftHead, as_own
from ..runner.heads.taps import HiddenTaps
from ..runner.interface import StepInputs
from ..runner.shards import NewWeight
from . import ExecutorState, Part
from .speculation import Speculation
from .weights import WeightChanges


class DraftHeads(Part):
    """The hidden states of each pass, copies of their blocks, and new weights of an MTP head."""

    def __init__(self, state: ExecutorState, speculation: Speculation, head: DraftHead) -> None:
        super().__init__(state)
        drafts = speculation.draft_model
        assert isinstance(drafts, HeadDrafts)
        self._drafts, self._steps, self._head = drafts, state.steps, head
        self._taps = HiddenTaps(state.runner, head.reads)
        # The last states of all tokens are wanted, not only of those with logits.
        self._steps.reads_all = not head.reads
        self._steps.watch = self._watch
        self._staged: dict[str, Tensor] = {}
        if head.in_model:
            state.parts.get(WeightChanges).manager.divert = self._divert

    def _watch(self, inputs: StepInputs) -> None:
        assert inputs.source is not None
        self._drafts.keep(inputs.source[0], self._taps.states)

    def _divert(self, new_weights: Mapping[str, NewWeight]) -> Mapping[str, NewWeight]:
        """Stage the head's tensors among those of an update. Raises WeightsError."""
        own = {
            name: each
            for name, each in new_weights.items()
            if isinstance(each, Tensor) and self._head.owns(name)
        }
        if not own:
            return new_weights
        try:
            self._staged |= as_own(self._head, own, "the new weights")
        except ModelError as error:
            raise WeightsError(error.message) from error
        return {name: each for name, each in new_weights.items() if name not in own}

    def before(self, step: LaunchedStep) -> None:
        if step.plan.copies:
            self._drafts.copy_blocks(step.plan.copies)

    @torch.no_grad()
    def replaced(self) -> None:
        if self._staged:
            state = self._head.state_dict()
            for name, each in self._staged.items():
                state[name].copy_(each)
            self._staged = {}

    def close(self) -> None:
        self._taps.remove()
        self._steps.watch = None
