"""The batching core: sequences, their blocks, and the plans in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec

from ...bus.control import Cancel, ReplicaCapacity
from ...bus.messages import AdmittedRequest, Credit, SequenceSpec
from ...bus.steps import NewSequence, StepPlan, StepSummary
from ...bus.weights import InFlight
from ...config import EngineConfig, SchedulerConfig
from ..parts import Kind
from .caches import cache_class
from .deciding import decide
from .parts import PARTS, BatchingParts, Entry
from .plans import PlanDraft, SentPlan, aborted, expired, settle
from .report import Counters, Report
from .schedule import NOTHING, SchedulerOutput
from .sequence import Sequence
from .starting import enqueue, shared_prefills
from .states import FINISHED, RUNNING, WAITING, SequenceStates


class UnknownMessage(ValueError):
    """A message that no part of batching handles."""


class BatchingCore(SequenceStates):
    """Plans the steps of a replica.

    Use: `add` each dispatch, send the plans of `plan` until it returns None, and `absorb` each
    result in order. Up to `steps_ahead` plans are in flight. Messages that concern an optional part
    go through `receive`.

    Four rules make planning ahead safe:
    1. A result for a sequence that is finished here is dropped.
    2. Blocks are freed once the last step that names them is back.
    3. A sequence that ended at step n may have a row in step n+1; that row is dropped.
    4. A block is shared only once the step that computed it is back.

    Attributes:
        steps_ahead: Most plans in flight.
        paused: While set, no step is planned.
        lacks: As in MemoryState; while it is not empty, no step is planned.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: ReplicaCapacity,
        *,
        steps_ahead: int = 2,
        parts: tuple[Entry, ...] = PARTS,
    ) -> None:
        limits = SchedulerConfig(
            max_batch_size=capacity.max_batch_size,
            max_tokens_per_batch=config.max_tokens_per_batch,
            block_size=capacity.block_size,
        )
        make_cache = cache_class(config.cache_type)
        cache = make_cache(capacity.num_blocks, capacity.block_size)
        super().__init__(limits, cache, BatchingParts(self, config, parts))
        self.steps_ahead = steps_ahead
        # Started with a shared prefill by the last plan; the next one copies their partial blocks.
        self._sharing: list[Sequence] = []
        # Running sequences that match one of these drop their KV with the next plan, which waits
        # for all results.
        self._recompute: list[Callable[[Sequence], bool]] = []
        self._step_id = 0
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
        if not (receivers := self._parts.handlers(message)):
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

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of a class. Raises KeyError if it is not in use."""
        return self._parts.get(kind)

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the part of a class; None if it is not in use so far."""
        return self._parts.find(kind)

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
        for seq_id, number in decision.num_blocks.items():
            allocation = self.index[seq_id].allocation
            block_ids = tuple([self.cache.extend(allocation) for _ in range(number)])
            draft.grown.append((seq_id, block_ids))
        num_tokens = decision.num_tokens
        for seq_id in decision.prefill_seqs:
            seq = self.index[seq_id]
            self.counters.prefilled += num_tokens[seq_id]
            if seq.status is WAITING:
                num_blocks = seq.blocks_to_start(self.limits.block_size)
                blocks = self.cache.start(seq.allocation, num_blocks)
                draft.copies += blocks.copies
                self._start(seq, blocks.cached_length, draft)
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
        plan = draft.plan()
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
