"""Which of those that wait may start in the next step, and what that would take."""

from __future__ import annotations

from collections.abc import Iterable

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .sequence import Sequence

MOST_LOOKS = 2
"""At how many waiting sequences a plan looks at most, in batches."""


def startable(
    waiting: Iterable[Sequence],
    prefilling: Iterable[Sequence],
    room: int,
    cache: KVCacheManager,
    num_free: int,
    limits: SchedulerConfig,
) -> list[Sequence]:
    """Waiting sequences that may start, in order, with what starting each would take.

    No further than to the one that fills the step, and not much further than a batch where
    many wait for a prompt that they share: else each step would look through the whole queue.
    A sequence waits while another computes what it could share, and siblings that come
    together wait for the first of them: a shared prompt is computed once.

    Args:
        waiting: In order.
        prefilling: Running sequences whose prompt is not computed.
        room: How many may start.
        cache: Where their prefixes are looked for.
        num_free: Its free blocks.
        limits: The scheduler's.
    """
    chosen: list[Sequence] = []
    num_blocks = num_tokens = 0
    computing = {cache.next_run(seq.lease) for seq in prefilling}
    for looked_at, seq in enumerate(waiting):
        if (
            looked_at == MOST_LOOKS * limits.max_batch_size
            or len(chosen) == room
            or num_blocks >= num_free
            or num_tokens >= limits.max_tokens_per_batch
        ):
            break
        match = cache.match(seq.lease)
        if match.next_run is not None:
            if match.next_run in computing and seq.lease.may_reuse:
                continue
            computing.add(match.next_run)
        seq.num_cached = match.num_cached
        seq.num_to_allocate = match.num_needed
        chosen.append(seq)
        num_blocks += match.num_needed
        num_tokens += len(seq.token_ids) - match.num_cached
    return chosen
