"""The next step: which sequences start, which run on, and which pinned blocks they take."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from ...config import SchedulerConfig
from .cache import KVCacheManager
from .images import ImageCache
from .plans import SentPlan
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence
from .sessions import SessionTable
from .starting import startable


class Turns(NamedTuple):
    """Which sequences the next of several plans in flight may contain, over pipeline stages.

    No sequence is in two plans in flight: none of them waits for another one's tokens.

    Attributes:
        sent: The plans in flight.
        num_stages: Stages of the model.
    """

    sent: Seq[SentPlan]
    num_stages: int

    def next(
        self, running: Seq[Sequence], num_waiting: int, most: int
    ) -> tuple[Seq[Sequence], int]:
        """Return running sequences, in order, and how many may start beside them.

        A plan has an even share of the sequences, so that plans fill the stages alike.

        Args:
            running: In the order of `schedule`.
            num_waiting: Sequences that may start.
            most: Most sequences that run.
        """
        share = -(-min(len(running) + num_waiting, most) // self.num_stages)
        if self.sent:
            if sum(bool(each.seqs) for each in self.sent) >= self.num_stages:
                return (), 0  # another plan would only split the shares
            oldest = self.sent[0].plan.step_id
            running = [seq for seq in running if seq.last_step < oldest]
        # What is left over fits another plan, since that has less than its share.
        running = running[:share]
        return running, share - len(running)


def decide(
    waiting: Collection[Sequence],
    running: Seq[Sequence],
    cache: KVCacheManager,
    sessions: SessionTable,
    limits: SchedulerConfig,
    now_ns: int,
    *,
    drafts: bool,
    turns: Turns | None = None,
    images: ImageCache | None = None,
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
        turns: Whose turn it is; None if it is everyone's.
        images: As for `schedule`.
    """
    chosen, room = running, len(waiting)
    if turns is not None:
        chosen, room = turns.next(running, len(waiting), limits.max_batch_size)
    num_elsewhere = len(running) - len(chosen)
    while True:
        starting = _startable(waiting, running, cache, sessions, limits, now_ns)[:room]
        free = cache.num_free_blocks()
        more: dict[str, Any] = {"drafts": drafts, "num_elsewhere": num_elsewhere, "images": images}
        decision = schedule(starting, chosen, free, limits, **more)
        if not sessions.pins:
            return decision
        late = next((seq for seq in starting if seq.seq_id not in decision.num_tokens), None)
        if late is None and not decision.preempted_seqs:
            return decision
        # Dropping a pin with whose blocks it starts would not help it.
        own = frozenset() if late is None else cache.held_prefix(late.lease)
        but = frozenset() if decision.preempted_seqs else own
        free += sessions.num_reclaimable(but)
        without = schedule(starting, chosen, free, limits, **more)
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
