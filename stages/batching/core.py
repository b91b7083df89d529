"""The batching core: sequences, their blocks, and the plans in flight."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import assert_never

import msgspec

from ...bus.control import Cancel, ReplicaCapacity, TiersChanged
from ...bus.links import HandoverMessage
from ...bus.messages import AdmittedRequest, Credit, RequestInfo, SequenceSpec
from ...bus.parts.adapters import AdaptersPlan
from ...bus.parts.handover import HandoversPlan, leaving_of
from ...bus.parts.images import ImagesPlan
from ...bus.parts.memory import ReleasePlan
from ...bus.parts.speculation import DraftsPlan
from ...bus.parts.tiers import TiersPlan
from ...bus.parts.weights import WeightsPlan
from ...bus.sections import Sections
from ...bus.steps import AUDIT_SEQ_ID, NewSequence, StepPlan, StepSummary
from ...bus.times import Break
from ...bus.weights import InFlight
from ...config import EngineConfig, SchedulerConfig
from ...store.board import LoadedAdapter
from .arrivals import Arrivals
from .audit import BLOCKS_SAVED_AT_ONCE, TierAudit
from .caches import make_cache
from .deciding import Turns, decide
from .handover import NOTHING_OFFERED, Handovers
from .images import NO_IMAGES, ImageCache
from .index import SequenceIndex
from .plans import NextPlan, SentPlan, aborted, expired, settle, unloaded
from .report import Counters, Report, kv_report
from .schedule import NOTHING, SchedulerOutput
from .sequence import Sequence, SequenceStatus
from .sessions import SessionTable
from .starting import enqueue, shared_prefills


class BatchingCore:
    """Owns the sequences of a replica, their block tables and the prefix cache.

    Use: `add` each dispatch, send the plans of `plan` until it returns None, and `absorb` each
    result in order. Up to `steps_ahead` plans are in flight, or one more than pipeline stages.

    Four rules make planning ahead safe:
    1. A result for a sequence that is finished here is dropped.
    2. Blocks are freed once the last step that names them is back.
    3. A sequence that ended at step n may have a row in step n+1; that row is dropped.
    4. A block is shared only once the step that computed it is back.

    Attributes:
        limits: The scheduler's.
        cache: The prefix cache.
        tiers: The KV tiers below it; None if there are none.
        events: The log of blocks that can be found; None without `kv_events`.
        sessions: Conversations whose KV clients keep between turns.
        handovers: The sequences that other replicas continue.
        images: The embeddings that the executor has; None if the model takes no images.
        paused: While set, no step is planned.
        lacks: As in MemoryState; while it is not empty, no step is planned.
    """

    def __init__(
        self, config: EngineConfig, capacity: ReplicaCapacity, *, steps_ahead: int = 2
    ) -> None:
        self.limits = SchedulerConfig(
            max_batch_size=capacity.max_batch_size,
            max_tokens_per_batch=config.max_tokens_per_batch,
            block_size=capacity.block_size,
        )
        self.cache = make_cache(config, capacity)
        self.tiers, self.events = self.cache.tiers, self.cache.events
        self._audit: TierAudit | None = None
        if self.tiers is not None:
            self._audit = TierAudit(self.tiers, self.cache, self.limits)
        self.sessions = SessionTable(self.cache, config, self._room_to_load)
        self.images = ImageCache(capacity.images) if capacity.images is not None else None
        self.paused = False
        self.lacks: tuple[str, ...] = ()
        stages = capacity.pipeline_stages if steps_ahead > 1 else 1
        self._steps_ahead = stages + 1 if stages > 1 else steps_ahead
        drafts = config.speculation == "auto" and capacity.drafts
        self._max_drafts = config.max_draft_tokens if drafts else 0
        self._draft_rest = 0  # plans to come that allow no drafts
        self._adapter_versions: dict[str, int] = {}
        self.set_adapters(capacity.adapters)
        self._index = SequenceIndex()
        self.handovers = Handovers(self.cache, self._index)
        self._arrivals = Arrivals(self.cache, self._new_sequence)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # the first to be preempted last
        # Finished, or to be paused (RUNNING), but named by a plan in flight.
        self._leaving: dict[int, Sequence] = {}
        self._paused_seqs: dict[int, Sequence] = {}
        # Started with a shared prefill by the last plan; the next one copies their partial blocks.
        self._sharing: list[Sequence] = []
        self._sent: deque[SentPlan] = deque()
        self._turns = Turns(self._sent, stages) if stages > 1 else None
        self._next = NextPlan()
        self._step_id = 0
        self._report, self._counters = Report(), Counters()

    # --- requests -----------------------------------------------------------------------------

    def add(self, request: AdmittedRequest, deadline_ns: int | None = None) -> None:
        """Let the sequences of a dispatch wait, behind sequences that rank before them.

        A request whose adapter is not loaded ends. `deadline_ns` is on the clock given to `plan`.
        """
        info = request.info
        if self._lacks_adapter(info):
            unstarted = not self._index.of_request(info.request_id)
            self.cancel(msgspec.structs.replace(unloaded(info), unstarted=unstarted))
        elif request.successors:
            self.handovers.add(request, deadline_ns)
        for spec in request.sequences:
            if (seq := self._new_sequence(request, spec)) is not None:
                self._index.add(seq, deadline_ns)
                enqueue(self._waiting, seq)
            else:
                self._report.end(spec.seq_id)

    def take_in(self, message: HandoverMessage, deadline_ns: int | None) -> RequestInfo | None:
        """Apply a message of another replica; return the request that is handed over with it."""
        if (arrival := self._arrivals.apply(message, deadline_ns)) is None:
            return None
        seq, request = arrival.seq, arrival.request
        if arrival.cancelled:
            self._report.end(request.sequences[0].seq_id)
        elif seq is None or self._lacks_adapter(request.info):
            self.add(request, arrival.deadline_ns)
        else:
            self._set_adapter_version(seq)
            self._index.add(seq, arrival.deadline_ns)
            enqueue(self._waiting, seq)
        return request.info

    def cancel(self, cancel: Cancel) -> None:
        """End a request's sequences; the next plan passes the cancellation on."""
        samples = self._index.of_request(cancel.request_id)
        if self._arrivals.cancel(cancel.request_id):
            cancel = msgspec.structs.replace(cancel, unstarted=False)
        elif samples:
            unstarted = not any(seq.started or seq.handed_over for seq in samples)
            cancel = msgspec.structs.replace(cancel, unstarted=unstarted)
        self._next.ended.append(cancel)
        for seq in samples:
            self._finish(seq)

    def abort_all(self, why: str) -> None:
        """End all requests with the tokens that they have."""
        for info in (*self._index.requests(), *self._arrivals.requests()):
            self.cancel(aborted(info, why))

    def stop(self, seq_ids: Iterable[int]) -> None:
        """End sequences that need no more tokens. Ended ones are ignored."""
        for seq_id in seq_ids:
            if (seq := self._index.get(seq_id)) is not None:
                self._finish(seq)

    def pause_sequences(self, seq_ids: Iterable[int]) -> None:
        """Pause sequences until `resume_sequences`. Ended ones are ignored.

        They keep their tokens; their KV stays in the prefix cache until its blocks are needed.
        """
        for seq_id in seq_ids:
            seq = self._index.get(seq_id)
            if seq is None or seq_id in self._leaving or seq_id in self._paused_seqs:
                continue
            if seq.status is SequenceStatus.WAITING:
                self._waiting.remove(seq)
                self._set_paused(seq)
            else:
                self._stop_running(seq)
                self._next.left.append((seq_id, "preemption"))

    def resume_sequences(self, seq_ids: Iterable[int], rank: int = 0) -> None:
        """Let paused sequences wait to run again."""
        for seq_id in seq_ids:
            seq = self._paused_seqs.pop(seq_id, None)
            if seq is None:
                self._report.free_slots += 1  # the sequence has ended, and its place is free again
            else:
                seq.rank = rank
                enqueue(self._waiting, seq)

    # --- weights, adapters, memory ------------------------------------------------------------

    def recompute(self) -> None:
        """With the next plan, all running sequences drop their KV and compute it again."""
        self._next.recompute.append(lambda seq: True)

    def interrupt(self, in_flight: InFlight, why: str) -> None:
        """Apply an in-flight mode to all requests; `why`: for clients whose requests end."""
        match in_flight:
            case "keep":
                pass
            case "retract":
                self.recompute()
            case "abort":
                self.abort_all(why)
            case _:
                assert_never(in_flight)

    def change_weights(self, version: int, in_flight: InFlight) -> None:
        """Put new weights in place with the next plan.

        No sequence that starts from then on finds KV of older weights, nor KV of sequences that
        run across the change.
        """
        self.interrupt(in_flight, "the weights were replaced, and requests in flight were to end")
        if any(seq.pools for seq in self._running):
            # A prompt's vector has to be of one version.
            self._next.recompute.append(lambda seq: seq.pools)
        self._next.weight_version = version

    def set_adapters(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Set the adapters of an executor that has no sequences."""
        versions = {adapter.id: adapter.version for adapter in adapters}
        for id, _ in self._adapter_versions.items() - versions.items():
            self.cache.retire_adapter(id)
        self._adapter_versions = versions

    def uses_adapter(self, id: str) -> bool:
        """Whether a sequence that has not ended uses the adapter."""
        return any(seq.info.adapter == id for seq in self._index.values())

    def change_adapter(self, id: str, version: int, in_flight: InFlight) -> None:
        """Put new weights of an adapter in place with the next plan, or (version 0) remove it.

        No sequence that starts from then on finds KV of older weights. Removing an adapter ends its
        requests.
        """
        self._next.adapters[id] = version
        requests = [info for info in self._index.requests() if info.adapter == id]
        if not version:
            self._adapter_versions.pop(id, None)
        else:
            self._adapter_versions[id] = version
        self.sessions.change_adapter(id, version)
        if in_flight == "abort":
            change = "replaced" if version else "unloaded"
            for info in requests:
                why = f"the adapter was {change}, and requests in flight were to end"
                self.cancel(aborted(info, why))
        elif not version:
            for info in requests:
                self.cancel(unloaded(info))
        elif in_flight == "retract":
            self._next.recompute.append(lambda seq: seq.info.adapter == id)
        seqs = [seq for seq in self._index.values() if seq.info.adapter == id]
        if any(seq.pools for seq in seqs):
            self._next.recompute.append(lambda seq: seq.pools and seq.info.adapter == id)
        for seq in seqs:
            self._set_adapter_version(seq)
        self.cache.retire_adapter(id)

    def change_memory(self, lacks: tuple[str, ...], release: tuple[str, ...]) -> None:
        """Release memory with the next plan, and plan no steps while memory is lacking.

        Without the KV cache, all prefixes are forgotten and running sequences compute theirs again.
        """
        self.lacks = lacks
        self._next.release = release
        if "kv_cache" in release:
            self.recompute()

    def change_tiers(self, changes: TiersChanged) -> None:
        """Apply the executor's report about its KV tiers."""
        if self.cache.change_tiers(changes):
            self.recompute()  # running sequences may have loaded such blocks
        if self.tiers is not None:
            self.sessions.tiers_changed()

    # --- failures -----------------------------------------------------------------------------

    def forget_plans(self) -> None:
        """Drop the plans in flight, whose results will never come.

        Running sequences give up their blocks and wait again, in their order, with the tokens
        that they have. The executor must forget its sequences before the next plan.
        """
        self._next.ended[:0] = [cancel for sent in self._sent for cancel in sent.plan.ended]
        if self.tiers is not None:
            self.tiers.forget_plans([sent.plan for sent in self._sent])
        if self._audit is not None:
            self._audit.clear()
        self.handovers.forget_plans()
        self.sessions.forget_loads()
        if self.images is not None:
            self.images.clear()
        self._sent.clear()
        for seq in list(self._leaving.values()):
            self._leave(seq)
        for seq in self._running[::-1]:
            self._give_up(seq, "recovery")
        self._next.forget.clear()

    def clear(self) -> None:
        """Drop all sequences, but not the prefix cache.

        The executor must forget its sequences before the next plan.
        """
        self.forget_plans()
        self.sessions.forget_turns()
        self.handovers.clear()
        self._arrivals.clear()
        self._index.clear()
        self._waiting.clear()
        self._paused_seqs.clear()
        self._next = NextPlan()
        self._report = Report()
        self._step_id = self._draft_rest = 0

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """Return the next step; None if there is none, or if enough plans are in flight."""
        for info in self._index.deadlines.pop_until(now_ns):
            self.cancel(expired(info))
        if self.tiers is not None and self.tiers.has_offers:
            self.tiers.end_offers(now_ns)
        next_plan = self._next
        if len(self._sent) >= (1 if next_plan.waits_for_results else self._steps_ahead):
            return None
        if next_plan.recompute:
            self._recompute(next_plan.recompute)
        next_plan.begin(self.cache, self.images)
        if next_plan.weight_version:
            # Weights that hold nothing are replaced only by a complete set.
            self.lacks = tuple(tag for tag in self.lacks if tag != "weights")
        if self._arrivals.fetching and not (self.paused or self.lacks):
            self._arrivals.fetch()
        if self.sessions.known:
            self.sessions.begin_plan(self._step_id + 1, now_ns)
        decision = self._decide(now_ns)
        for seq_id in decision.preempted_seqs:
            # Victims come last first, so the one that runs longest ends up in front.
            self._give_up(self._index[seq_id], "preemption")
            self._counters.preemptions += 1
        audit = self._begin_idle_work()
        has_moves = self._audit is not None and self._audit.has_moves
        if not (decision.num_tokens or audit or has_moves or next_plan.cannot_wait):
            return None
        self._next = NextPlan()
        self._step_id += 1
        self._draft_rest = max(self._draft_rest - 1, 0)
        return self._build(decision, next_plan, now_ns, audit)

    def absorb(self, result: StepSummary) -> None:
        """Apply the result of the oldest plan in flight.

        Raises:
            ValueError: The result is not that of the oldest plan.
        """
        if not self._sent or self._sent[0].plan.step_id != result.step_id:
            raise ValueError(f"step {result.step_id} came back out of order")
        sent = self._sent.popleft()
        if self._audit is not None and self._audit.absorb(result.step_id):
            self._next.forget.append(AUDIT_SEQ_ID)
        if self.sessions.known:
            self.sessions.absorb(result.step_id)
        if result.spoiled and self.images is not None:
            self.images.spoil(map(self._index.get, result.spoiled))
        due, num_wasted = settle(sent, result)
        self._counters.wasted += num_wasted
        for seq in due:
            self._commit(seq)
        self.stop(result.ended)
        for seq in self.handovers.absorb(sent.plan, result) if leaving_of(sent.plan.parts) else ():
            self._finish(seq)
        self._draft_rest = result.draft_rest or self._draft_rest
        self._report.add_step(result)
        for seq in [s for s in self._leaving.values() if s.last_step <= result.step_id]:
            self._leave(seq)

    # --- state --------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Paused, with no plan in flight and no KV left to drop."""
        return self.paused and not self._sent and not self._next.recompute

    @property
    def fetches(self) -> bool:
        """Whether blocks are being fetched from disk."""
        return self.tiers is not None and self.tiers.fetches

    @property
    def audits(self) -> bool:
        """Whether the next plan computes a loaded block again, or compares it."""
        due = self._audit is not None and (self._audit.is_due or self._audit.has_moves)
        return due and self._rests

    @property
    def saves(self) -> bool:
        """Whether the next plan saves blocks to disk."""
        return self.cache.has_unsaved and self._rests

    @property
    def _rests(self) -> bool:
        """Whether nothing runs or waits, and steps may run."""
        return not (self._index or self._leaving or self._sent or self.paused or self.lacks)

    @property
    def idle(self) -> bool:
        """No sequence, no plan in flight, and no cancellation to pass on."""
        return not (self._index or self._leaving or self._sent or self._next.ended)

    def fetch_of(self, seq_id: int) -> tuple[int, int]:
        """Return since when a sequence that has just started waited for its blocks (0 if it didn't
        wait), and how many it loaded from the tiers."""
        seq = self._index[seq_id]
        return seq.fetching_since_ns, seq.lease.num_loaded

    def info_of(self, seq_id: int) -> RequestInfo | None:
        """Return the request of a sequence; None if the sequence has ended."""
        seq = self._index.get(seq_id)
        return seq.info if seq is not None else None

    def next_deadline_ns(self) -> int | None:
        """Return when `plan` is due: a request's time or a session's is over. None for never."""
        first, expiry = self._index.deadlines.first_key(), self.sessions.next_expiry_ns
        return expiry if first is None or (expiry is not None and expiry < first) else first

    def take_report(self) -> Credit | None:
        """Return a report for fairness if one is due. Call it after each `absorb`."""
        if not self._report.is_due:
            return None
        report, self._report = self._report, Report()
        free = self.cache.num_free_blocks() + len(self.sessions.pins)  # which give way
        return report.message(free * self.limits.block_size)

    def take_counters(self) -> Counters:
        """Return the counts since the last call."""
        counters, self._counters = self._counters, Counters()
        return counters

    def load(self) -> dict[str, int]:
        """Return numbers of sequences and blocks. Cached blocks are counted at each call."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "set_aside": len(self._paused_seqs),
            **kv_report(self.cache),
            "kv_pinned": len(self.sessions.pins),
        }

    def check(self) -> None:
        """Check that every sequence and every block is in exactly one place.

        Raises:
            AssertionError: One is lost, or in two places.
        """
        leaving = self._leaving.values()
        leases = [seq.lease for seq in (*self._running, *leaving)]
        audits = self._audit.leases if self._audit is not None else []
        self.cache.check([*audits, *leases, *self.sessions.leases()])
        pausing = [seq for seq in leaving if seq.status is not SequenceStatus.FINISHED]
        alive = [*self._waiting, *self._running, *pausing, *self._paused_seqs.values()]
        self._index.check(alive)
        assert self._sent or not leaving, "a sequence is kept though no plan names it"

    # --- deciding -----------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> SchedulerOutput:
        if self.paused or self.lacks:
            self._next.held_since_ns = self._next.held_since_ns or now_ns
            return NOTHING
        decision = self._schedule(now_ns, self._turns)
        if not decision.preempted_seqs:
            return decision
        if self._sent:
            # Blocks that a plan in flight uses can't change hands: wait for its result.
            return NOTHING
        for seq in self._running:
            seq.num_reclaimable = self.cache.num_reclaimable(seq.lease)
        # Out of all: the last to be preempted need not be one whose turn it is.
        return self._schedule(now_ns, None)

    def _schedule(self, now_ns: int, turns: Turns | None) -> SchedulerOutput:
        about = (self._waiting, self._running, self.cache, self.sessions, self.limits)
        drafts = not self._draft_rest
        return decide(*about, now_ns, drafts=drafts, turns=turns, images=self.images)

    def _room_to_load(self) -> int | None:
        """Return how many free blocks no sequence needs soon; None if no block may be moved."""
        reserved = -(-len(self._running) // self.limits.block_size)
        free = 0 if self._waiting else self.cache.num_free_blocks() - reserved
        return None if self.paused or self.lacks else max(free, 0)

    def _begin_idle_work(self) -> NewSequence | None:
        """While nothing else runs, save blocks to disk, and start the audit of a loaded block."""
        if self._audit is None or not self._rests:
            return None
        self.cache.save(BLOCKS_SAVED_AT_ONCE)
        return self._audit.begin(self._step_id + 1)

    def _build(
        self,
        decision: SchedulerOutput,
        next_plan: NextPlan,
        now_ns: int,
        audit: NewSequence | None = None,
    ) -> StepPlan:
        """Apply a decision; return its plan. `audit`: a sequence to compute besides."""
        copies = [
            (seq.lease.source, seq.lease.block_ids[-1])
            for seq in self._sharing
            if seq.lease.source >= 0  # else it has given up its blocks meanwhile
        ]
        self._sharing.clear()
        grown = tuple(
            (seq_id, tuple(self.cache.extend(self._index[seq_id].lease) for _ in range(number)))
            for seq_id, number in decision.num_blocks.items()
        )
        new: list[NewSequence] = []
        num_tokens, num_drafts = decision.num_tokens, decision.num_drafts
        for seq_id in decision.prefill_seqs:
            seq = self._index[seq_id]
            self._counters.prefilled += num_tokens[seq_id]
            if seq.status is SequenceStatus.WAITING:
                num_blocks = seq.blocks_to_start(self.limits.block_size)
                allocation = self.cache.start(seq.lease, num_blocks)
                copies += allocation.copies
                new.append(self._start(seq, allocation.cached_length))
                if num_tokens[seq_id] > seq.num_remaining:  # it loads what another start stored
                    num_tokens = {**num_tokens, seq_id: seq.num_remaining}
        of_images = NO_IMAGES
        if self.images is not None:
            num_tokens, of_images = self.images.plan(num_tokens, self._index)
        self._counters.decoded += len(decision.decode_seqs)
        if self._waiting and not decision.preempted_seqs:
            num_tokens = self._with_shared_prefills(num_tokens, new)
        seqs, step_id = [self._index[seq_id] for seq_id in num_tokens], self._step_id
        for seq, number in zip(seqs, num_tokens.values(), strict=True):
            # `Sequence.plan`, without a call for each row.
            seq.num_planned += number == seq.num_planned - seq.num_scheduled
            seq.num_scheduled += number
            seq.last_step = step_id
        for seq_id, number in num_drafts.items():
            self._index[seq_id].num_drafting += number
        if audit is not None:
            new.append(audit)
            num_tokens = {AUDIT_SEQ_ID: len(audit.token_ids) - 1 - audit.num_cached}
        offered = self.handovers.offer(seqs, step_id, now_ns) if self.handovers else NOTHING_OFFERED
        parts: Sections = (next_plan.times(len(decision.decode_seqs), now_ns),)
        if next_plan.weight_version:
            parts += (WeightsPlan(next_plan.weight_version),)
        if next_plan.release:
            parts += (ReleasePlan(next_plan.release),)
        if next_plan.adapters:
            parts += (AdaptersPlan(tuple(next_plan.adapters.items())),)
        if num_drafts:
            parts += (DraftsPlan(tuple([num_drafts.get(i, 0) for i in num_tokens])),)
        moves = self._audit.take_moves() if self._audit is not None else ()
        if moves or offered.blocks:
            parts += (TiersPlan(moves, offered.blocks),)
        if offered.handovers:
            parts += (HandoversPlan(offered.handovers),)
        if of_images.forgotten or of_images.encodes:
            parts += (ImagesPlan(of_images.forgotten, of_images.encodes),)
        plan = StepPlan(
            step_id=step_id,
            new=tuple(new),
            seq_ids=tuple(num_tokens),
            num_tokens=tuple(num_tokens.values()),
            grown=grown,
            copies=tuple(copies),
            finished=tuple(next_plan.forget),
            ended=tuple(next_plan.ended),
            made_ns=now_ns,
            parts=parts,
        )
        self._sent.append(SentPlan(plan, seqs))
        return plan

    def _with_shared_prefills(
        self, num_tokens: Mapping[int, int], new: list[NewSequence]
    ) -> Mapping[int, int]:
        """Add a row without tokens behind each row whose prefill a waiting sequence shares."""
        shared = shared_prefills(
            num_tokens, self._index, self._waiting, len(self._running), self.cache, self.limits
        )
        rows: dict[int, int] = {}
        for seq_id, number in num_tokens.items():
            rows[seq_id] = number
            for seq in shared.get(seq_id, ()):
                self.cache.share(seq.lease, self._index[seq_id].lease)
                self._sharing.append(seq)
                new.append(self._start(seq, len(seq.token_ids)))
                seq.set_next_commit(self.limits.block_size)  # the source commits the prompt
                rows[seq.seq_id] = 0
        return rows

    def _start(self, seq: Sequence, num_cached: int) -> NewSequence:
        """Let a waiting sequence run, whose lease has its blocks."""
        num_tokens = len(seq.token_ids)
        resumes = seq.started or (seq.num_generated > 0 and not seq.handed_over)
        self._counters.count_start(num_tokens, num_cached, resumes=resumes)
        self._report.started.append((seq.seq_id, num_tokens - num_cached))
        self._waiting.remove(seq)
        seq.start(num_cached)
        insort(self._running, seq, key=attrgetter("order"))
        if (wish := seq.kv_session) is None:
            return seq.for_executor()
        turn = (seq.seq_id, seq.tenant, wish, seq.lease, seq.max_length)
        return seq.for_executor(self.sessions.begin(*turn))

    # --- sequences ----------------------------------------------------------------------------

    def _new_sequence(self, request: AdmittedRequest, spec: SequenceSpec) -> Sequence | None:
        """Return a sequence that doesn't wait yet; None if its adapter is not loaded."""
        if self._lacks_adapter(request.info):
            return None
        seq = Sequence.dispatched(request, spec, self._max_drafts)
        self._set_adapter_version(seq)
        if request.remote is not None:
            self.cache.expect(seq.lease, request.remote)
        return seq

    def _lacks_adapter(self, info: RequestInfo) -> bool:
        return bool(info.adapter) and info.adapter not in self._adapter_versions

    def _set_adapter_version(self, seq: Sequence) -> None:
        """Set the version of a sequence's adapter. KV that it has computed so far isn't shared."""
        if id := seq.info.adapter:
            scope = seq.cache_scope._replace(adapter=id, adapter_version=self._adapter_versions[id])
            self.cache.move(seq.lease, scope)

    def _recompute(self, matches: list[Callable[[Sequence], bool]]) -> None:
        for seq in reversed([seq for seq in self._running if any(m(seq) for m in matches)]):
            self._give_up(seq, "weights")
        matches.clear()

    def _give_up(self, seq: Sequence, why: Break) -> None:
        """Stop a running sequence that no plan in flight names, and let it wait in front."""
        self._running.remove(seq)
        self._next.forget.append(seq.seq_id)
        self._next.left.append((seq.seq_id, why))
        self._release(seq)
        self._waiting.appendleft(seq)

    def _stop_running(self, seq: Sequence) -> None:
        """Stop a running sequence, which leaves once no plan in flight names it."""
        self._running.remove(seq)
        self._next.forget.append(seq.seq_id)
        self._leaving[seq.seq_id] = seq
        if not self._sent or seq.last_step < self._sent[0].plan.step_id:
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that has finished or is to be paused."""
        del self._leaving[seq.seq_id]
        if seq.status is SequenceStatus.FINISHED:
            self.cache.release(seq.lease)
            self._report.end(seq.seq_id, ended=not seq.left)
            self.sessions.end(seq.seq_id, seq.lease.token_ids, seq.lease.scope)
        else:
            self._release(seq)
            self._set_paused(seq)

    def _release(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence; the KV that it has computed stays cached."""
        self._commit(seq)
        self.cache.release(seq.lease)
        seq.preempt()

    def _set_paused(self, seq: Sequence) -> None:
        self._paused_seqs[seq.seq_id] = seq
        self._report.pause(seq.seq_id)

    def _commit(self, seq: Sequence) -> None:
        """Add computed tokens to the prefix cache.

        Called after the first step, which frees the source of a copy, when the prompt is computed,
        whenever a block is full, and at the end, but not for each token.
        """
        if seq.num_computed == seq.num_cached or seq.is_whole:
            # The first step isn't back, so its copies may not be made; or there is no KV at all.
            return
        self.cache.commit(seq.lease, seq.num_computed)
        seq.set_next_commit(self.limits.block_size)

    def _finish(self, seq: Sequence) -> None:
        """End a sequence; its blocks stay until no plan in flight names them."""
        was_running = seq.status is SequenceStatus.RUNNING
        seq.status = SequenceStatus.FINISHED
        self._index.remove(seq)
        if seq.hands_over:
            self.handovers.forget(seq)
        if self._paused_seqs.pop(seq.seq_id, None) is not None:
            self._report.ended.append(seq.seq_id)  # its place was freed when it paused
            self.sessions.end(seq.seq_id, seq.lease.token_ids, seq.lease.scope)
        elif not was_running:
            self._waiting.remove(seq)
            self._report.end(seq.seq_id)
            self.sessions.end(seq.seq_id, seq.lease.token_ids, seq.lease.scope)
        else:
            self._commit(seq)
            if seq.seq_id not in self._leaving:
                self._stop_running(seq)
