"""Plans of the engine that wait for blocks of its KV tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..bus.steps import StepPlan
from ..config.clock import now_ns
from ..stages.batching import BatchingCore
from ..stages.tier_log import log_differences

if TYPE_CHECKING:
    from ..stages.executor.runner.tiers.tiers import BlockTiers

_FETCH_WAIT_S = 1.0


def next_plan(batching: BatchingCore, tiers: BlockTiers | None) -> StepPlan | None:
    """Return the next plan, after waiting for blocks from disk if nothing else can run."""
    if tiers is None:
        return batching.plan(now_ns())
    while True:
        if (changes := tiers.take_changes()) is not None:
            batching.receive(changes, now_ns())
            log_differences(changes)
        plan = batching.plan(now_ns())
        if plan is not None or not batching.part("tiers").fetches:
            return plan
        tiers.wait(_FETCH_WAIT_S)
