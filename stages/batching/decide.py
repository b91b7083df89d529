"""What the next step has, of the sequences that run and those that wait."""

from __future__ import annotations

from collections.abc import Collection

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .running import RunningBatch
from .schedule import SchedulerOutput, grant_drafts, schedule, schedule_prefills
from .sequence import Sequence
from .startable import startable


def decide(
    running: RunningBatch,
    waiting: Collection[Sequence],
    cache: KVCacheManager,
    limits: SchedulerConfig,
    *,
    drafts: bool = True,
) -> SchedulerOutput:
    """What `schedule` says of all sequences; it is asked only where blocks are short.

    Else those in step get one token each, which `num_tokens` does not say: the step has one for
    each place in the batch. Those with speculation get one, and leave to verify drafts. Then only
    prompts are left to be decided. Without `drafts` nobody gets such leave.
    """
    num_free, room = cache.num_free_blocks(), limits.max_batch_size - len(running)
    starting: list[Sequence] = []
    if waiting and room > 0:
        prefilling = running.prefilling()
        starting = startable(waiting, prefilling, room, cache, num_free, limits)
    if running.gather(drafts=drafts):
        apart = running.decoding_apart()
        lacking = sum(seq.needs_block(limits.block_size) for seq in apart)
        num_left = num_free - len(running.growing()) - lacking
        if num_left >= 0:
            draftable = apart if drafts else []
            return _without_preemption(running, apart, draftable, starting, num_left, limits)
    running.write_back_all()
    if num_free < len(running):
        for seq in running:
            seq.num_reclaimable = cache.num_reclaimable(seq.lease)
    return schedule(starting, list(running), num_free, limits)


def _without_preemption(
    running: RunningBatch,
    apart: list[Sequence],
    draftable: list[Sequence],
    starting: list[Sequence],
    num_free: int,
    limits: SchedulerConfig,
) -> SchedulerOutput:
    """All decodes run, and have their blocks; `num_free` are left."""
    decodes = running.in_step + tuple(seq.seq_id for seq in apart)
    num_tokens = schedule_prefills(
        starting, running.others, len(running), len(decodes), num_free, limits
    )
    prefills = tuple(num_tokens)
    num_drafts: dict[int, int] = {}
    if draftable:
        block_size = limits.block_size
        starts = [seq for seq in starting if seq.seq_id in num_tokens]
        num_free -= sum(seq.blocks_to_start(block_size) for seq in starts)
        budget = limits.max_tokens_per_batch - len(decodes) - sum(num_tokens.values())
        num_drafts = grant_drafts(draftable, num_free, budget, block_size)
    num_tokens |= dict.fromkeys((seq.seq_id for seq in apart), 1)
    return SchedulerOutput(prefills, decodes, (), num_tokens, num_drafts)
