"""The next step: the schedule, with the blocks and the choices of optional parts."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .parts import BatchingParts
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence
from .starting import startable


def decide(
    waiting: Collection[Sequence],
    running: Seq[Sequence],
    cache: KVCacheManager,
    limits: SchedulerConfig,
    parts: BatchingParts,
    *,
    all_run: bool = False,
) -> SchedulerOutput:
    """Decide what runs in the next step; see `schedule`.

    Args:
        waiting: In order.
        running: As for `schedule`.
        cache: Holds their blocks.
        limits: The scheduler's.
        parts: May choose sequences, give back blocks, limit prefills, and extend the decision.
        all_run: Whether no part chooses sequences.
    """
    chosen, room = running, len(waiting)
    for choose in () if all_run else parts.choose:
        chosen, room = choose(len(waiting))
    num_elsewhere = len(running) - len(chosen)
    starting: list[Sequence] = []

    def with_free(num_free: int) -> SchedulerOutput:
        step_limits = [limit() for limit in parts.limit]
        about = (starting, chosen, num_free, limits)
        return schedule(*about, num_elsewhere=num_elsewhere, limits=step_limits)

    while True:
        starting = _startable(waiting, running, cache, limits, parts)[:room]
        decision = with_free(cache.num_free_blocks())
        if not any(relieve(decision, starting, with_free) for relieve in parts.relieve):
            break
    for extend in parts.extend:
        decision = extend(decision)
    return decision


def _startable(
    waiting: Collection[Sequence],
    running: Seq[Sequence],
    cache: KVCacheManager,
    limits: SchedulerConfig,
    parts: BatchingParts,
) -> list[Sequence]:
    room = limits.max_batch_size - len(running)
    if not waiting or room <= 0:
        return []
    prefilling = [seq for seq in running if seq.num_computed < seq.num_to_prefill]
    num_free = cache.num_free_blocks() + sum([number() for number in parts.num_spare_blocks])
    return startable(waiting, prefilling, room, cache, limits, num_free)
