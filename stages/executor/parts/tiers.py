"""KV tiers below the cache."""

from __future__ import annotations

import time

from ....bus.control import ReplicaCapacity
from ....bus.parts.tiers import TiersPlan
from ....bus.sections import with_sections
from ..driver.step import LaunchedStep
from ..driver.trial import trial_step
from ..fingerprint import kv_digest
from ..runner.tiers.tiers import BlockTiers
from . import ExecutorState, Part
from .recipes import Recipes
from .weights import WeightChanges

_TRIAL_TOKENS = 64
"""Tokens of the step that measures the time of one."""


class Tiers(Part):
    """Moves and offers blocks for plans.

    Attributes:
        blocks: The tiers.
    """

    reads = TiersPlan

    def __init__(self, state: ExecutorState, *, shares: bool) -> None:
        """Allocate the tiers. `shares`: with other executors."""
        super().__init__(state)
        self.blocks = BlockTiers(
            state.config,
            state.model,
            state.runner.cache,
            state.parts.get(WeightChanges).manager.version,
            self._measure_token_ns(),
            computation=kv_digest(state.parts.get(Recipes).fingerprint),
            shares=shares,
        )
        self._offers: TiersPlan | None = None

    def apply(self, section: TiersPlan, step: LaunchedStep) -> None:
        self.blocks.apply(section.moves)
        if section.offers:
            self._offers = section

    def launched(self, step: LaunchedStep) -> None:
        # Not in `finish`: the next plan may load from these slots.
        if self._offers is not None:
            offers, self._offers = self._offers.offers, None
            self.blocks.offer(offers, step.plan.step_id)

    def reset(self) -> None:
        self._offers = None
        self.blocks.reset()

    def close(self) -> None:
        self.blocks.close()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return with_sections(found, self.blocks.capacity)

    def _measure_token_ns(self) -> int:
        """Return the time to compute a token of a prompt, among others."""
        step = trial_step(self.state.runner)
        with self.state.runner.active():
            step(_TRIAL_TOKENS, 1)
            started_ns = time.perf_counter_ns()
            step(_TRIAL_TOKENS, 1)
        return (time.perf_counter_ns() - started_ns) // _TRIAL_TOKENS
