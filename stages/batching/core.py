"""The batching core: sequences, their blocks, and the plans in flight."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, assert_never

import msgspec

from ...bus.control import Cancel, ReplicaCapacity
from ...bus.messages import AdmittedRequest, Credit, RequestInfo, SequenceSpec
from ...bus.steps import NewSequence, StepPlan, StepSummary
from ...bus.times import Break
from ...bus.weights import InFlight
from ...config import EngineConfig, SchedulerConfig
from .caches import cache_class
from .deciding import decide
from .index import SequenceIndex
from .parts import PARTS, Entry, Parts
from .plans import PlanDraft, SentPlan, aborted, expired, settle
from .report import Counters, Report
from .schedule import NOTHING, SchedulerOutput
from .sequence import Sequence, SequenceStatus
from .starting import enqueue, shared_prefills

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
PAUSED, FINISHED = SequenceStatus.PAUSED, SequenceStatus.FINISHED


class UnknownMessage(ValueError):
    """A message that no part of batching handles."""


class BatchingCore:
    """Owns the sequences of a replica, their block tables and the prefix cache.

    Use: `add` each dispatch, send the plans of `plan` until it returns None, and `absorb` each
    result in order. Up to `steps_ahead` plans are in flight. Messages that concern an optional part
    go through `receive`.

    The states of a sequence:

                         _start
        add ──► WAITING ───────► RUNNING
                 │ ▲ ▲              │ _leave (preempted, paused, ended)
                 │ │ │              ▼
                 │ │ │           leaving: PAUSED or FINISHED, but named by a plan in flight
                 │ │ │              │ _free, once this plan is back
                 │ │ └──────────────┼───────────────┐
                 │ │ resume         ▼               │ preempted: no plan in flight names it
                 │ └──────────── PAUSED             │
                 └─ _leave ─────────┴──► FINISHED   ┴

    Four rules make planning ahead safe:
    1. A result for a sequence that is finished here is dropped.
    2. Blocks are freed once the last step that names them is back.
    3. A sequence that ended at step n may have a row in step n+1; that row is dropped.
    4. A block is shared only once the step that computed it is back.

    Attributes:
        limits: The scheduler's.
        cache: The prefix cache.
        steps_ahead: Most plans in flight.
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
        self,
        config: EngineConfig,
        capacity: ReplicaCapacity,
        *,
        steps_ahead: int = 2,
        parts: tuple[Entry, ...] = PARTS,
    ) -> None:
        self.limits = SchedulerConfig(
            max_batch_size=capacity.max_batch_size,
            max_tokens_per_batch=config.max_tokens_per_batch,
            block_size=capacity.block_size,
        )
        make_cache = cache_class(config.cache_type)
        self.cache = make_cache(capacity.num_blocks, capacity.block_size)
        self.steps_ahead = steps_ahead
        self.paused = False
        self.lacks: tuple[str, ...] = ()
        self.index = SequenceIndex()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.sent: deque[SentPlan] = deque()
        self.report, self.counters = Report(), Counters()
        # Paused or finished, but named by a plan in flight.
        self._leaving: dict[int, Sequence] = {}
        # Started with a shared prefill by the last plan; the next one copies their partial blocks.
        self._sharing: list[Sequence] = []
        # Running sequences that match one of these drop their KV with the next plan, which waits
        # for all results.
        self._recompute: list[Callable[[Sequence], bool]] = []
        self._next = PlanDraft()
        self._step_id = 0
        self._parts = Parts(self, config, parts)
        self._parts.make_configured(capacity)

    # --- messages -----------------------------------------------------------------------------

    def add(self, request: AdmittedRequest, deadline_ns: int | None = None) -> None:
        """Let the sequences of a dispatch wait, after sequences that rank before them.

        A request that a part refuses ends. `deadline_ns` is on the clock given to `plan`.
        """
        if request.parts or request.info.adapter:
            self._parts.make_for(request)
        for accept in self._parts.accept:
            if not accept(request, deadline_ns):
                for spec in request.sequences:
                    self.report.end(spec.seq_id)
                return
        for spec in request.sequences:
            seq = self.new_sequence(request, spec)
            self.index.add(seq, deadline_ns)
            enqueue(self.waiting, seq)

    def new_sequence(self, request: AdmittedRequest, spec: SequenceSpec) -> Sequence:
        """Return a sequence that is not in the index yet."""
        seq = Sequence.dispatched(request, spec)
        for admit in self._parts.admit:
            admit(seq, request)
        return seq

    def receive(self, message: object, now_ns: int, deadline_ns: int | None = None) -> Any:
        """Apply a message that concerns optional parts; return the reply, if there is one.

        Raises:
            UnknownMessage: No part handles it.
        """
        if not (receivers := self._parts.receivers(message)):
            raise UnknownMessage(type(message).__name__)
        replies = [part.receive(message, now_ns, deadline_ns) for part in receivers]
        return next((reply for reply in replies if reply is not None), None)

    def cancel(self, cancel: Cancel) -> None:
        """End a request's sequences; the next plan passes the cancellation on."""
        samples = self.index.of_request(cancel.request_id)
        if any(ends(cancel.request_id) for ends in self._parts.ends_elsewhere):
            cancel = msgspec.structs.replace(cancel, unstarted=False)
        elif samples:
            unstarted = not any(seq.started or seq.handed_over for seq in samples)
            cancel = msgspec.structs.replace(cancel, unstarted=unstarted)
        self._next.ended.append(cancel)
        for seq in samples:
            self._leave(seq, FINISHED)

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

    def interrupt(self, in_flight: InFlight, why: str) -> None:
        """Apply an in-flight mode to all requests; `why`: for clients whose requests end."""
        match in_flight:
            case "keep":
                pass
            case "retract":
                self.recompute()
            case "abort":
                elsewhere = [info for requests in self._parts.requests for info in requests()]
                for info in (*self.index.requests(), *elsewhere):
                    self.cancel(aborted(info, why))
            case _:
                assert_never(in_flight)

    def recompute(self, matches: Callable[[Sequence], bool] = lambda seq: True) -> None:
        """With the next plan, running sequences that match drop their KV and compute it again."""
        self._recompute.append(matches)

    # --- failures -----------------------------------------------------------------------------

    def forget_plans(self) -> None:
        """Drop the plans in flight, whose results will never come.

        Running sequences give up their blocks and wait again, in their order, with the tokens
        that they have. The executor must forget its sequences before the next plan.
        """
        self._next.ended[:0] = [cancel for sent in self.sent for cancel in sent.plan.ended]
        for lose in self._parts.lose:
            lose()
        self.sent.clear()
        for seq in list(self._leaving.values()):
            self._free(seq, RUNNING)
        for seq in self.running[::-1]:
            self._leave(seq, WAITING, "recovery")
        self._next.forget.clear()

    def clear(self) -> None:
        """Drop all sequences, but not the prefix cache.

        The executor must forget its sequences before the next plan.
        """
        self.forget_plans()
        for reset in self._parts.reset:
            reset()
        self.index.clear()
        self.waiting.clear()
        self._recompute.clear()
        self._next, self.report, self._step_id = PlanDraft(), Report(), 0

    def restart(self, capacity: ReplicaCapacity) -> None:
        """Begin an epoch with an executor that has no sequences."""
        if self.cache.weight_version != capacity.weight_version:
            # A failure came between the plan with new weights and its result.
            self.cache.begin_weight_version(capacity.weight_version)
        self.lacks = capacity.lacks
        self._parts.make_configured(capacity)
        for restart in self._parts.restart:
            restart(capacity)

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """Return the next step; None if there is none, or if enough plans are in flight."""
        for info in self.index.deadlines.pop_until(now_ns):
            self.cancel(expired(info))
        if len(self.sent) >= (1 if self._recompute else self.steps_ahead):
            return None
        if matches := self._recompute:
            for seq in reversed([seq for seq in self.running if any(m(seq) for m in matches)]):
                self._leave(seq, WAITING, "weights")
            matches.clear()
        for begin in self._parts.begin:
            begin(now_ns)
        decision = self._decide(now_ns)
        for seq_id in decision.preempted_seqs:
            # Victims come last first, so the one that runs longest ends up in front.
            self._leave(self.index[seq_id], WAITING, "preemption")
            self.counters.preemptions += 1
        extra = [rest(self._step_id + 1) for rest in self._parts.rest] if self.rests else []
        new = list(filter(None, extra))
        if not (decision.num_tokens or new or self._next.ended) and not any(
            is_urgent() for is_urgent in self._parts.is_urgent
        ):
            return None
        draft, self._next = self._next, PlanDraft()
        self._step_id += 1
        draft.step_id, draft.now_ns, draft.decision = self._step_id, now_ns, decision
        return self._build(draft, new)

    def absorb(self, result: StepSummary) -> None:
        """Apply the result of the oldest plan in flight.

        Raises:
            ValueError: The result is not that of the oldest plan.
        """
        if not self.sent or self.sent[0].plan.step_id != result.step_id:
            raise ValueError(f"step {result.step_id} came back out of order")
        sent = self.sent.popleft()
        elsewhere = [seq for absorb in self._parts.absorb for seq in absorb(sent, result)]
        due, num_wasted = settle(sent, result)
        self.counters.wasted += num_wasted
        for seq in due:
            self._commit(seq)
        self.stop(result.ended)
        for seq in elsewhere:
            self._leave(seq, FINISHED)
        self.report.add_step(result)
        for seq in [s for s in self._leaving.values() if s.last_step <= result.step_id]:
            self._free(seq, RUNNING)

    # --- state --------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Paused, with no plan in flight and no KV left to drop."""
        return self.paused and not self.sent and not self._recompute

    @property
    def rests(self) -> bool:
        """Whether nothing runs or waits, and steps may run."""
        return not (self.index or self._leaving or self.sent or self.paused or self.lacks)

    @property
    def idle(self) -> bool:
        """No sequence, no plan in flight, and no cancellation to pass on."""
        return not (self.index or self._leaving or self.sent or self._next.ended)

    def part(self, name: str) -> Any:
        """Return an optional part by its name in `PARTS`; None if this core has none so far."""
        return self._parts.find(name)

    def info_of(self, seq_id: int) -> RequestInfo | None:
        """Return the request of a sequence; None if the sequence has ended."""
        seq = self.index.get(seq_id)
        return seq.info if seq is not None else None

    def next_deadline_ns(self) -> int | None:
        """Return when `plan` is due although nothing happens; None for never."""
        times = (self.index.deadlines.first_key(), *[at() for at in self._parts.wake_at_ns])
        return min((time for time in times if time is not None), default=None)

    def take_report(self) -> Credit | None:
        """Return a report for fairness if one is due. Call it after each `absorb`."""
        if not self.report.is_due:
            return None
        report, self.report = self.report, Report()
        spare = sum([number() for number in self._parts.num_spare_blocks])
        return report.message((self.cache.num_free_blocks() + spare) * self.limits.block_size)

    def take_counters(self) -> Counters:
        """Return the counts since the last call."""
        counters, self.counters = self.counters, Counters()
        return counters

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return the parts' counts since the last call, by group."""
        return {name: group for take in self._parts.take_counts for name, group in take().items()}

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

    # --- deciding -----------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> SchedulerOutput:
        if self.paused or self.lacks:
            self._next.held_since_ns = self._next.held_since_ns or now_ns
            return NOTHING
        about = (self.waiting, self.running, self.cache, self.limits, self._parts)
        decision = decide(*about)
        if not decision.preempted_seqs:
            return decision
        if self.sent:
            # Blocks that a plan in flight uses can't change hands: wait for its result.
            return NOTHING
        for seq in self.running:
            seq.num_reclaimable = self.cache.num_reclaimable(seq.allocation)
        # Out of all: the last to be preempted need not be one that a part would choose.
        return decide(*about, all_run=True)

    def _build(self, draft: PlanDraft, extra: list[NewSequence]) -> StepPlan:
        """Apply a decision; return its plan. `extra`: sequences to compute besides."""
        decision = draft.decision
        draft.copies = [
            (seq.allocation.source, seq.allocation.block_ids[-1])
            for seq in self._sharing
            if seq.allocation.source >= 0  # else it has given up its blocks meanwhile
        ]
        self._sharing.clear()
        grown = tuple(
            (
                seq_id,
                tuple(self.cache.extend(self.index[seq_id].allocation) for _ in range(number)),
            )
            for seq_id, number in decision.num_blocks.items()
        )
        num_tokens = decision.num_tokens
        for seq_id in decision.prefill_seqs:
            seq = self.index[seq_id]
            self.counters.prefilled += num_tokens[seq_id]
            if seq.status is WAITING:
                num_blocks = seq.blocks_to_start(self.limits.block_size)
                allocation = self.cache.start(seq.allocation, num_blocks)
                draft.copies += allocation.copies
                self._start(seq, allocation.cached_length, draft)
                if num_tokens[seq_id] > seq.num_remaining:  # it loads what another start stored
                    num_tokens = {**num_tokens, seq_id: seq.num_remaining}
        draft.num_tokens = num_tokens
        for fit in self._parts.fit:
            fit(draft)
        self.counters.decoded += len(decision.decode_seqs)
        if self.waiting and not decision.preempted_seqs:
            self._share_prefills(draft)
        draft.seqs = [self.index[seq_id] for seq_id in draft.num_tokens]
        for seq, number in zip(draft.seqs, draft.num_tokens.values(), strict=True):
            # `Sequence.plan`, without a call for each row.
            seq.num_planned += number == seq.num_planned - seq.num_scheduled
            seq.num_scheduled += number
            seq.last_step = draft.step_id
        for new in extra:
            draft.new.append(new)
            draft.num_tokens = {new.seq_id: len(new.token_ids) - 1 - new.num_cached}
        for planned in self._parts.planned:
            planned(draft)
        plan = draft.plan(grown)
        self.sent.append(SentPlan(plan, draft.seqs))
        return plan

    def _share_prefills(self, draft: PlanDraft) -> None:
        """Add a row without tokens after each row whose prefill a waiting sequence shares."""
        rows, num_running = draft.num_tokens, len(self.running)
        shared = shared_prefills(
            rows, self.index, self.waiting, num_running, self.cache, self.limits
        )
        if not shared:
            return
        draft.num_tokens = {}
        for seq_id, number in rows.items():
            draft.num_tokens[seq_id] = number
            for seq in shared.get(seq_id, ()):
                self.cache.share(seq.allocation, self.index[seq_id].allocation)
                self._sharing.append(seq)
                self._start(seq, len(seq.token_ids), draft)
                seq.set_next_commit(self.limits.block_size)  # the source commits the prompt
                draft.num_tokens[seq.seq_id] = 0

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
