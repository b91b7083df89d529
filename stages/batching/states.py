"""The sequences of a replica, where each of them is, and how it gets elsewhere."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from ...bus.times import Break
from ...config import SchedulerConfig
from .cache import KVCacheManager
from .index import SequenceIndex
from .parts import BatchingParts
from .plans import PlanDraft, SentPlan
from .report import Counters, Report
from .sequence import Sequence, SequenceStatus
from .starting import enqueue

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
PAUSED, FINISHED = SequenceStatus.PAUSED, SequenceStatus.FINISHED


class SequenceStates:
    """The sequences of a replica and their states, with the blocks that they hold.

                   _start
    add ─► WAITING ──────► RUNNING
            ▲ ▲ │             │
            │ │ │             │ _leave: a plan in flight may name it, so it keeps its blocks
     resume │ │ │ _leave      ▼
            │ └─┼───────── (leaving) ── _free ──► FINISHED
            │   │             │                       ▲
            │   ▼             │ _free                 │
            └─ PAUSED ◄───────┘                       │
                └────────────── _leave ───────────────┘

    The status of a leaving sequence is the state that it goes to: PAUSED or FINISHED; a preempted
    one is named by no plan, so it is WAITING at once. A waiting or paused sequence has no blocks,
    and `_leave` ends or pauses it at once.

    Attributes:
        limits: The scheduler's.
        cache: The prefix cache.
        paused: While set, no step is planned.
        lacks: As in MemoryState; while it is not empty, no step is planned.
        index: All waiting, running and paused sequences.
        waiting: In order.
        running: The first to be preempted last.
        sent: The plans in flight.
        report: For fairness.
        counters: Counts since the last `take_counters`.
    """

    def __init__(
        self, limits: SchedulerConfig, cache: KVCacheManager, parts: BatchingParts
    ) -> None:
        self.limits, self.cache = limits, cache
        self.paused = False
        self.lacks: tuple[str, ...] = ()
        self.index = SequenceIndex()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.sent: deque[SentPlan] = deque()
        self.report, self.counters = Report(), Counters()
        self._parts = parts
        self._next = PlanDraft()
        # Paused or finished, but named by a plan in flight.
        self._leaving: dict[int, Sequence] = {}

    @property
    def rests(self) -> bool:
        """Whether nothing runs or waits, and steps may run."""
        return not (self.index or self._leaving or self.sent or self.paused or self.lacks)

    @property
    def idle(self) -> bool:
        """No sequence, no plan in flight, and no cancellation to pass on."""
        return not (self.index or self._leaving or self.sent or self._next.ended)

    def stop(self, seq_ids: Iterable[int]) -> None:
        """End sequences that need no more tokens. Ended ones are ignored."""
        for seq_id in seq_ids:
            if (seq := self.index.get(seq_id)) is not None:
                self._leave(seq, FINISHED)

    def pause_sequences(self, seq_ids: Iterable[int]) -> None:
        """Pause sequences until `resume_sequences`. Ended ones are ignored.

        They keep their tokens; their KV stays in the prefix cache until its blocks are needed.
        """
        for seq_id in seq_ids:
            seq = self.index.get(seq_id)
            if seq is not None and seq.status is not PAUSED:
                self._leave(seq, PAUSED, "preemption")

    def resume_sequences(self, seq_ids: Iterable[int], rank: int = 0) -> None:
        """Let paused sequences wait to run again."""
        for seq_id in seq_ids:
            seq = self.index.get(seq_id)
            if seq is None or seq.status is not PAUSED or seq_id in self._leaving:
                self.report.free_slots += 1  # the sequence has ended, and its place is free again
            else:
                seq.status, seq.rank = WAITING, rank
                enqueue(self.waiting, seq)

    def load(self) -> dict[str, int]:
        """Return numbers of sequences and blocks. Cached blocks are counted at each call."""
        paused = sum(seq.status is PAUSED for seq in self.index.values())
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "set_aside": paused - sum(seq.status is PAUSED for seq in self._leaving.values()),
            "kv_free": self.cache.num_free_blocks(),
            "kv_total": self.cache.num_blocks,
            "kv_cached": self.cache.num_cached_blocks(),
            **{name: n for numbers in self._parts.numbers for name, n in numbers().items()},
        }

    def check(self) -> None:
        """Check that every sequence and every block is in exactly one place.

        Raises:
            AssertionError: One is lost, or in two places.
        """
        held = [seq.allocation for seq in (*self.running, *self._leaving.values())]
        self.cache.check([*held, *(each for own in self._parts.allocations for each in own())])
        paused = [seq for seq in self.index.values() if seq.status is PAUSED]
        self.index.check([*self.waiting, *self.running, *paused])
        states = Counter(seq.status for seq in self.index.values())
        assert (states[WAITING], states[RUNNING]) == (len(self.waiting), len(self.running))
        assert self.sent or not self._leaving, "a sequence is kept though no plan names it"

    # --- transitions --------------------------------------------------------------------------

    def _start(self, seq: Sequence, num_cached: int, draft: PlanDraft) -> None:
        """Let a waiting sequence run, whose allocation has its blocks."""
        num_tokens = len(seq.token_ids)
        resumes = seq.started or (seq.num_generated > 0 and not seq.handed_over)
        self.counters.count_start(num_tokens, num_cached, resumes=resumes)
        self.report.started.append((seq.seq_id, num_tokens - num_cached))
        self.waiting.remove(seq)
        seq.start(num_cached)
        insort(self.running, seq, key=attrgetter("order"))
        sections: dict[str, Any] = {"parts": (), "onward": ()}
        for start in self._parts.start:
            start(seq, sections)
        draft.new.append(seq.for_executor(sections))

    def _leave(self, seq: Sequence, to: SequenceStatus, why: Break | None = None) -> None:
        """Take a sequence from where it is: it waits again (in front), pauses or ends.

        A running one keeps its blocks while a plan in flight names it. `why`: it does not run on.
        """
        was, seq.status = seq.status, to
        is_leaving = seq.seq_id in self._leaving
        if to is FINISHED:
            self.index.remove(seq)
            for end in self._parts.end:
                end(seq)
            if was is RUNNING or is_leaving:
                self._commit(seq)
        if was is WAITING:
            self.waiting.remove(seq)
        elif was is RUNNING:
            self.running.remove(seq)
            self._next.forget.append(seq.seq_id)
            if why is not None:
                self._next.left.append((seq.seq_id, why))
            self._leaving[seq.seq_id] = seq
            is_leaving = bool(self.sent) and seq.last_step >= self.sent[0].plan.step_id
        if not is_leaving:
            self._free(seq, was)

    def _free(self, seq: Sequence, was: SequenceStatus) -> None:
        """Free the blocks of a sequence that no plan in flight names, and its place.

        The KV that it has computed stays cached. `was`: its state before it left.
        """
        to = seq.status
        if self._leaving.pop(seq.seq_id, None) is not None:
            if to is not FINISHED:
                self._commit(seq)
            self.cache.release(seq.allocation)
        if to is not FINISHED and was is RUNNING:
            seq.preempt()
        if to is WAITING:
            self.waiting.appendleft(seq)
        elif to is PAUSED:
            seq.status = PAUSED
            self.report.pause(seq.seq_id)
        elif was is PAUSED:
            self.report.ended.append(seq.seq_id)  # its place was freed when it paused
        else:
            self.report.end(seq.seq_id, ended=not seq.left)
        if to is FINISHED:
            for leave in self._parts.leave:
                leave(seq)

    def _commit(self, seq: Sequence) -> None:
        """Add computed tokens to the prefix cache.

        Called after the first step, which frees the source of a copy, when the prompt is computed,
        whenever a block is full, and at the end, but not for each token.
        """
        if seq.num_computed == seq.num_cached or seq.is_whole:
            # The first step isn't back, so its copies may not be made; or there is no KV at all.
            return
        self.cache.commit(seq.allocation, seq.num_computed)
        seq.set_next_commit(self.limits.block_size)
