"""Which of those that wait begin with the first token of another's prompt."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .sequence import Sequence
from .startable import MOST_LOOKS


def choose_forks(
    leaders: Seq[Sequence],
    waiting: Iterable[Sequence],
    num_running: int,
    cache: KVCacheManager,
    limits: SchedulerConfig,
) -> dict[int, list[Sequence]]:
    """Waiting sequences that fork: they have the very tokens that a row of the step ends with.

    What that row computes is then all that they need for a token of their own. Left to wait, they
    would find it in the cache when the step is back, and compute the last token again, each for
    itself: their first token would come a step later, or two.

    Nobody is passed by who ranks before them, and a fork takes no block that those who run may need
    in the next step.

    Args:
        leaders: Those that compute the last of their tokens in the step, and have their blocks.
        waiting: Those that wait, in order, without those that start in the step.
        num_running: All that run, with those that start.
        cache: Theirs, as the starts have left it.
        limits: The scheduler's.

    Returns:
        By the leader's id, in order.
    """
    leaders = [seq for seq in leaders if not seq.pools and cache.is_current(seq.lease)]
    chosen: dict[int, list[Sequence]] = {}
    if not leaders:
        return chosen
    num_free, best_rank = cache.num_free_blocks(), float("inf")
    for looked_at, seq in enumerate(waiting):
        reserved = -(-num_running // limits.block_size)
        if (
            looked_at == MOST_LOOKS * limits.max_batch_size
            or num_running == limits.max_batch_size
            or num_free <= reserved
        ):
            break
        leader = next((leader for leader in leaders if _may_fork(seq, leader)), None)
        if leader is None:
            best_rank = min(best_rank, seq.rank)
        elif seq.rank <= best_rank:
            chosen.setdefault(leader.seq_id, []).append(seq)
            num_running += 1
            # For its last tokens where they fill no block, or else for the next one.
            num_free -= 1
    return chosen


def _may_fork(seq: Sequence, leader: Sequence) -> bool:
    return (
        seq.lease.may_reuse
        and not (seq.started or seq.pools)
        and seq.lease.scope == leader.lease.scope
        and seq.token_ids == leader.token_ids
    )
