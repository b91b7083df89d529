"""The next step: which sequences start, which run on, and which pinned blocks they take."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence
from .sessions import SessionTable
from .starting import startable


def decide(
    waiting: Collection[Sequence],
    running: Seq[Sequence],
    cache: KVCacheManager,
    sessions: SessionTable,
    limits: SchedulerConfig,
    now_ns: int,
    *,
    drafts: bool,
) -> SchedulerOutput:
    """Decide what runs in the next step; see `schedule`.

    Pins give way, the first to expire first, before a sequence is preempted, and where one that
    waits would start but for them. Sequences that begin to wait for their blocks get the time.

    Args:
        waiting: In order.
        running: As for `schedule`.
        cache: Holds their blocks.
        sessions: Holds the pins.
        limits: The scheduler's.
        now_ns: The time.
        drafts: Whether drafted tokens may be verified.
    """
    while True:
        starting = _startable(waiting, running, cache, sessions, limits, now_ns)
        free = cache.num_free_blocks()
        decision = schedule(starting, running, free, limits, drafts=drafts)
        if not sessions.pins:
            return decision
        late = next((seq for seq in starting if seq.seq_id not in decision.num_tokens), None)
        if late is None and not decision.preempted_seqs:
            return decision
        # Dropping a pin with whose blocks it starts would not help it.
        own = frozenset() if late is None else cache.held_prefix(late.lease)
        but = frozenset() if decision.preempted_seqs else own
        free += sessions.num_reclaimable(but)
        without = schedule(starting, running, free, limits, drafts=drafts)
        saved = len(decision.preempted_seqs) - len(without.preempted_seqs)
        if saved <= 0 and len(without.prefill_seqs) <= len(decision.prefill_seqs):
            return decision
        sessions.give_way(own)


def _startable(
    waiting: Collection[Sequence],
    running: Seq[Sequence],
    cache: KVCacheManager,
    sessions: SessionTable,
    limits: SchedulerConfig,
    now_ns: int,
) -> list[Sequence]:
    room = limits.max_batch_size - len(running)
    if not waiting or room <= 0:
        return []
    prefilling = [seq for seq in running if seq.num_computed < seq.num_to_prefill]
    fetching: list[Sequence] = []
    num_free = cache.num_free_blocks() + len(sessions.pins)
    starting = startable(waiting, prefilling, room, cache, limits, fetching, num_free)
    for seq in fetching:
        seq.fetching_since_ns = seq.fetching_since_ns or now_ns
    return starting
