"""The engine's KV tiers, and its plans that wait for blocks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..bus.steps import StepPlan
from ..config.clock import now_ns
from ..stages.batching import BatchingCore
from ..stages.tier_log import log_differences

if TYPE_CHECKING:
    from ..stages.batching.parts.tiers.part import Tiers
    from ..stages.executor.core import ExecutorCore
    from ..stages.executor.runner.tiers.tiers import BlockTiers

_FETCH_WAIT_S = 1.0


class EngineTiers(NamedTuple):
    """The KV tiers: blocks in the executor, and batching's plans for them."""

    blocks: BlockTiers
    planned: Tiers

    @classmethod
    def of(cls, executor: ExecutorCore, batching: BatchingCore) -> EngineTiers:
        """Return the tiers of the cores, after sending batching the blocks on disk."""
        from ..stages.batching.parts.tiers import part as batching_part
        from ..stages.executor.parts import tiers as executor_part

        blocks = executor.part(executor_part.Tiers).blocks
        batching.receive(blocks.on_disk(), now_ns())
        return cls(blocks, batching.part(batching_part.Tiers))


def next_plan(batching: BatchingCore, tiers: EngineTiers | None) -> StepPlan | None:
    """Return the next plan, after waiting for blocks from disk if nothing else can run."""
    if tiers is None:
        return batching.plan(now_ns())
    while True:
        if (changes := tiers.blocks.take_changes()) is not None:
            batching.receive(changes, now_ns())
            log_differences(changes)
        plan = batching.plan(now_ns())
        if plan is not None or not tiers.planned.fetches:
            return plan
        tiers.blocks.wait(_FETCH_WAIT_S)
