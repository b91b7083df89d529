"""Speculative decoding: drafts are made, verified in the pass, and their acceptance is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....bus.control import ReplicaCapacity
from ....bus.parts.speculation import DraftCapacity, DraftsPlan, DraftsResult
from ....bus.sections import with_sections
from ..driver.sampled import Sampled
from ..driver.speculation.control import CostControl
from ..driver.speculation.costs import MOST_ROWS, StepCosts, measure_costs
from ..driver.speculation.speculator import Speculator, make_sources
from ..driver.step import LaunchedStep
from ..driver.trial import trial_step
from ..runner.interface import LoadedModel
from . import ExecutorState, Part

if TYPE_CHECKING:
    from ..driver.speculation.draft_model import DraftModel


class Speculation(Part):
    """Drafts for the rows that a plan allows drafts.

    Attributes:
        speculator: The sources of drafts.
        draft_model: One of them; None if there is none.
    """

    reads = DraftsPlan

    def __init__(self, state: ExecutorState, companion: LoadedModel | None) -> None:
        """Measure the costs of steps. `companion`: the model that drafts; None if none does."""
        super().__init__(state)
        self.draft_model = None
        if companion is not None:
            blocks, vocab_size = state.runner.cache.num_blocks, state.model.vocab_size
            self.draft_model = _drafts_of(companion)(
                state.config, companion, state.table, blocks, vocab_size
            )
            state.caches.append(self.draft_model.cache)
        costs = self._measure_costs()
        sources = make_sources(state.config, state.table, state.constraints)
        self.use(
            Speculator(
                state.table, state.constraints, sources, CostControl(costs), self.draft_model
            )
        )

    def _measure_costs(self) -> StepCosts:
        state = self.state
        with state.runner.active():
            longest, step = state.model.max_model_len, trial_step(state.runner)
            return measure_costs(step, MOST_ROWS, state.now_ns, longest=longest)

    def use(self, speculator: Speculator) -> None:
        """Draft with a speculator from now on."""
        self.speculator = self.state.steps.speculator = speculator

    def apply(self, section: DraftsPlan, step: LaunchedStep) -> None:
        step.num_drafts = section.num_tokens

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        outputs = step.outputs
        if outputs.sampled is not None:
            if not self.state.runs_ahead:
                self.speculator.timed((self.state.now_ns() - step.start_ns) * 1e-9)
            self.speculator.observe(outputs.sampled, sampled.seq_ids, outputs.proposed)
        drafts = tuple(one for one in outputs.verified if one.seq_id in sampled.seq_ids)
        step.num_computed += sum(draft.num_tokens for draft in drafts)
        if drafts or outputs.draft_rest:
            step.parts.append(DraftsResult(drafts, outputs.draft_rest))

    def forget(self, seq_id: int) -> None:
        self.speculator.forget(seq_id)

    def released(self) -> None:
        if self.draft_model is not None:
            self.draft_model.forget_kv()

    def reset(self) -> None:
        self.speculator.clear()

    def close(self) -> None:
        if self.draft_model is not None:
            self.draft_model.close()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return with_sections(found, DraftCapacity())


def _drafts_of(companion: LoadedModel) -> type[DraftModel]:
    if hasattr(companion.module, "reads"):
        from ..driver.speculation.draft_head import HeadDrafts

        return HeadDrafts
    from ..driver.speculation.draft_model import DraftModel

    return DraftModel
