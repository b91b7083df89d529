"""Carries a decision out: what starts, forks and grows, and the plan that tells the executor."""

from __future__ import annotations

from collections import deque

from ...bus.messages import NewSequence, StepPlan
from ...config import SchedulerConfig
from .cache import KVCacheManager
from .counters import Counters
from .forks import choose_forks
from .index import SequenceIndex
from .plans import NextPlan, PlannedRow, SentPlan
from .report import Report
from .running import RunningBatch
from .schedule import SchedulerOutput
from .sequence import Sequence, SequenceStatus


class PlanBuilder:
    """Makes plans. The books that it keeps while doing so are the core's."""

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: KVCacheManager,
        index: SequenceIndex,
        waiting: deque[Sequence],
        running: RunningBatch,
        report: Report,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._index = index
        self._waiting = waiting
        self._running = running
        self._report = report
        # Since the last plan; the blocks that they copy are computed with it.
        self._forked: list[Sequence] = []

    def build(
        self,
        step_id: int,
        decision: SchedulerOutput,
        next_plan: NextPlan,
        counters: Counters,
        now_ns: int,
    ) -> tuple[StepPlan, SentPlan]:
        """The plan of a step, and what is to be remembered of it until its result is back."""
        counters.decoded += len(decision.decode_seqs)
        counters.prefilled += sum(decision.num_tokens[s] for s in decision.prefill_seqs)
        in_step = self._running.in_step if decision.decode_seqs else ()
        apart: tuple[int, ...] = ()
        if len(in_step) < len(decision.decode_seqs):
            members = frozenset(in_step)
            apart = tuple(seq_id for seq_id in decision.decode_seqs if seq_id not in members)
        by_hand = [self._index[seq_id] for seq_id in apart + decision.prefill_seqs]
        new: list[NewSequence] = []
        grown: list[tuple[int, tuple[int, ...]]] = []
        copies = self._copies_of_forks()
        if in_step:
            growing = self._running.advance(step_id)
            grown += [(seq.seq_id, (self._cache.extend(seq.lease),)) for seq in growing]
        for seq in by_hand:
            if seq.status is SequenceStatus.WAITING:
                new.append(self._start(seq, copies, counters))
            elif lacking := seq.num_lacking(
                decision.num_drafts.get(seq.seq_id, 0), self._limits.block_size
            ):
                blocks = tuple(self._cache.extend(seq.lease) for _ in range(lacking))
                grown.append((seq.seq_id, blocks))
        rows: list[PlannedRow] = []
        forks = self._choose_forks(by_hand, decision)
        for seq in by_hand:
            num_drafts = decision.num_drafts.get(seq.seq_id, 0)
            rows.append(_row(seq, step_id, decision.num_tokens[seq.seq_id], num_drafts))
            for fork in forks.get(seq.seq_id, ()):
                new.append(self._fork(fork, seq, counters))
                rows.append(_row(fork, step_id))
        ended = tuple(next_plan.ended)
        plan = StepPlan(
            step_id=step_id,
            new=tuple(new),
            seq_ids=in_step + tuple(row.seq.seq_id for row in rows),
            num_tokens=(1,) * len(in_step) + tuple(row.num_tokens for row in rows),
            grown=tuple(grown),
            copies=tuple(copies),
            finished=tuple(next_plan.forget),
            ended=ended,
            made_ns=now_ns,
            weight_version=next_plan.weight_version,
            release=next_plan.release,
            adapters=tuple(next_plan.adapters.items()),
            num_drafts=(
                (0,) * len(in_step) + tuple(row.num_drafts for row in rows)
                if decision.num_drafts
                else ()
            ),
        )
        return plan, SentPlan(step_id, bool(in_step), tuple(rows), ended)

    # --- inside -------------------------------------------------------------------------------

    def _start(
        self, seq: Sequence, copies: list[tuple[int, int]], counters: Counters
    ) -> NewSequence:
        """A sequence that waits begins to run; returns what the executor is told of it."""
        allocation = self._cache.start(seq.lease, seq.blocks_to_start(self._limits.block_size))
        copies += allocation.copies
        return self._begin(seq, allocation.cached_length, counters)

    def _fork(self, seq: Sequence, leader: Sequence, counters: Counters) -> NewSequence:
        """The same, behind all that the leader has computed when the step is done."""
        self._cache.fork(seq.lease, leader.lease)
        self._forked.append(seq)
        new = self._begin(seq, len(seq.token_ids), counters)
        # The leader tells the cache of the prompt.
        seq.set_next_commit(self._limits.block_size)
        return new

    def _begin(self, seq: Sequence, num_cached: int, counters: Counters) -> NewSequence:
        num_tokens = len(seq.token_ids)
        goes_on = seq.started or seq.num_generated > 0
        counters.count_start(num_tokens, num_cached, goes_on=goes_on)
        self._report.started.append((seq.seq_id, num_tokens - num_cached))
        self._waiting.remove(seq)
        seq.start(num_cached)
        self._running.add(seq)
        return seq.for_executor()

    def _choose_forks(
        self, by_hand: list[Sequence], decision: SchedulerOutput
    ) -> dict[int, list[Sequence]]:
        if not self._waiting or decision.preempted_seqs:
            return {}
        leaders = [
            seq
            for seq in by_hand
            if seq.num_scheduled < seq.num_to_prefill
            and seq.num_remaining == decision.num_tokens[seq.seq_id]
        ]
        return choose_forks(leaders, self._waiting, len(self._running), self._cache, self._limits)

    def _copies_of_forks(self) -> list[tuple[int, int]]:
        """The blocks that those which forked in the last plan share in part; each gets its own."""
        forked, self._forked = self._forked, []
        return [
            (seq.lease.source, seq.lease.block_ids[-1])
            for seq in forked
            if seq.lease.source >= 0  # It has not given them up meanwhile.
        ]


def _row(seq: Sequence, step_id: int, num_tokens: int = 0, num_drafts: int = 0) -> PlannedRow:
    seq.last_step = step_id
    return PlannedRow(seq, num_tokens, seq.plan(num_tokens, num_drafts), num_drafts)
