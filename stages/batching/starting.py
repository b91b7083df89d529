"""The choice of waiting sequences to start, and of those that share a prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .sequence import Sequence

MOST_LOOKS = 2
"""Waiting sequences examined per plan, in batches."""


def enqueue(waiting: deque[Sequence], seq: Sequence) -> None:
    """Let a sequence wait after sequences that rank before it."""
    place = len(waiting)
    while place and waiting[place - 1].rank > seq.rank:
        place -= 1
    waiting.insert(place, seq)


def startable(
    waiting: Iterable[Sequence],
    prefilling: Iterable[Sequence],
    room: int,
    cache: KVCacheManager,
    limits: SchedulerConfig,
    num_free: int,
) -> list[Sequence]:
    """Return waiting sequences that may start, in order; set `num_cached` and `num_to_allocate`.

    The search ends with the sequence that fills the step, and after `MOST_LOOKS` batches. A
    sequence waits while another one computes tokens that both need, and siblings that come together
    wait for the first of them: a shared prompt is computed once. One whose blocks are fetched waits
    too, and delays no other.

    Args:
        waiting: In order.
        prefilling: Running sequences whose prompt is not computed.
        room: Most sequences that may start.
        cache: Holds their prefixes.
        limits: The scheduler's.
        num_free: Blocks that are free or can be freed.
    """
    chosen: list[Sequence] = []
    num_blocks = num_tokens = 0
    size, states = cache.block_size, cache.states
    computing = {cache.next_run(seq.allocation) for seq in prefilling}
    for seq in islice(waiting, MOST_LOOKS * limits.max_batch_size):
        if (
            len(chosen) == room
            or num_blocks >= num_free
            or num_tokens >= limits.max_tokens_per_batch
        ):
            break
        match = cache.match(seq.allocation)
        if match.next_run is not None:
            allocation = seq.allocation
            gains = allocation.num_known * size < allocation.max_reuse
            if gains and match.next_run in computing:
                continue
            computing.add(match.next_run)
        elif states.exists and states.follows(seq.allocation, match.num_cached // size):
            continue
        if cache.below.fetch(seq.allocation):
            continue
        seq.num_cached, seq.num_to_allocate = match.num_cached, match.num_needed
        chosen.append(seq)
        num_blocks += match.num_needed
        num_tokens += len(seq.token_ids) - match.num_cached
    return chosen


def shared_prefills(
    num_tokens: Mapping[int, int],
    index: Mapping[int, Sequence],
    waiting: Iterable[Sequence],
    num_running: int,
    cache: KVCacheManager,
    limits: SchedulerConfig,
) -> dict[int, list[Sequence]]:
    """Return waiting sequences that share a prefill, by the id of the one that computes it.

    A row that ends a prompt computes all that sequences with the same tokens need for a token of
    their own. Without sharing, they would find the prompt in the cache when the step is back, and
    get their first token one or two steps later, after computing the prompt's last token again.

    Sequences that rank before others keep their place in line, and none takes a block that running
    sequences may need in the next step.

    Args:
        num_tokens: Tokens that sequences with blocks compute in the step, by id.
        index: Sequences by id.
        waiting: In order, without sequences that start in the step.
        num_running: Running sequences, starting ones included.
        cache: After the starts of the step.
        limits: The scheduler's.
    """
    sources = [
        seq
        for seq_id, number in num_tokens.items()
        if (seq := index[seq_id]).num_scheduled < seq.num_to_prefill
        and seq.num_remaining == number
        and not seq.pools
        and cache.is_current(seq.allocation)
    ]
    shared: dict[int, list[Sequence]] = {}
    if not sources:
        return shared
    num_free, best_rank = cache.num_free_blocks(), float("inf")
    for seq in islice(waiting, MOST_LOOKS * limits.max_batch_size):
        reserved = -(-num_running // limits.block_size)
        if num_running == limits.max_batch_size or num_free <= reserved:
            break
        source = next((source for source in sources if _can_share(seq, source)), None)
        if source is None:
            best_rank = min(best_rank, seq.rank)
        elif seq.rank <= best_rank:
            shared.setdefault(source.seq_id, []).append(seq)
            num_running += 1
            num_free -= 1  # for the last partial block, or else for the next token
    return shared


def _can_share(seq: Sequence, source: Sequence) -> bool:
    return (
        seq.allocation.reuses_all
        and not (seq.started or seq.pools)
        and seq.allocation.scope == source.allocation.scope
        and seq.allocation.token_ids == source.allocation.token_ids
    )
