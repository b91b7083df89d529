"""The batch builder: sequences, their blocks, and the plans that are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import compress
from typing import assert_never

import msgspec

from ...bus.control import Cancel, ReplicaCapacity
from ...bus.messages import Credit, Dispatch, RequestInfo, StepPlan, StepResult
from ...bus.weights import InFlight
from ...config import EngineConfig
from .adapters import Adapters
from .books import check_books
from .build import PlanBuilder
from .caches import limits_of, make_cache
from .counters import Counters
from .decide import decide
from .index import SequenceIndex
from .plans import NextPlan, PlannedRow, SentPlan, accepted_tokens
from .report import Report
from .running import RunningBatch
from .schedule import NOTHING
from .sequence import Sequence, SequenceStatus


class BatchingCore:
    """Owns the sequences of a lane, their block tables and the prefix cache.

    Use: `add` what fairness dispatches, ask `plan` for the next step while it gives one, and
    `absorb` each result in order. Up to `steps_ahead` plans are under way at a time.

    The four rules that make planning ahead safe:
    1. A result for a sequence that is finished here is dropped.
    2. Blocks are freed once the last step that names them is back.
    3. A sequence that ended at step n may sit in step n+1; that row counts for nothing.
    4. A block can be found by others only when the step that computed it is back.
    """

    def __init__(
        self, config: EngineConfig, capacity: ReplicaCapacity, *, steps_ahead: int = 2
    ) -> None:
        self.limits = limits_of(config, capacity)
        self.cache = make_cache(config, capacity)
        self.paused = False
        # As in MemoryState; while it is not empty, no step is planned.
        self.lacks: tuple[str, ...] = ()
        self._counters = Counters()
        self._steps_ahead = steps_ahead
        drafts = config.speculation == "auto" and capacity.drafts
        self._max_drafts = config.max_draft_tokens if drafts else 0
        # So many plans to come allow no drafts.
        self._draft_rest = 0
        self._index = SequenceIndex()
        self._waiting: deque[Sequence] = deque()
        self._running = RunningBatch(capacity.block_size)
        # Finished, but a plan under way still names them.
        self._leaving: dict[int, Sequence] = {}
        self._sent: deque[SentPlan] = deque()
        self._next = NextPlan()
        # To pause when no plan under way names them any more; paused, until they are resumed.
        self._pausing_seqs: dict[int, Sequence] = {}
        self._paused_seqs: dict[int, Sequence] = {}
        self._step_id = 0
        self._report = Report()
        self._builder = PlanBuilder(
            self.limits, self.cache, self._index, self._waiting, self._running, self._report
        )
        self.adapters = Adapters(self._index, self.cache)
        self.adapters.set(capacity.adapters)

    # --- what comes in ------------------------------------------------------------------------

    def add(self, dispatch: Dispatch, deadline_ns: int | None = None) -> None:
        """Takes the sequences of a dispatch; they wait behind those that rank before them.

        `deadline_ns` is on the clock given to `plan`.
        """
        if self.adapters.refuse(dispatch, self.cancel, self._report):
            return
        for spec in dispatch.sequences:
            seq = Sequence.dispatched(dispatch, spec, self._max_drafts)
            self.adapters.stamp(seq)
            self._index.add(seq)
            self._enqueue(seq)
        if deadline_ns is not None:
            self._index.add_deadline(dispatch.info, deadline_ns)

    def cancel(self, cancel: Cancel) -> None:
        """Drops a request's sequences; the next plan passes the cancellation on."""
        samples = self._index.of_request(cancel.request_id)
        if samples:
            unstarted = not any(seq.started for seq in samples)
            cancel = msgspec.structs.replace(cancel, unstarted=unstarted)
        self._next.ended.append(cancel)
        for seq in samples:
            self._finish(seq)

    def stop(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences that need no more tokens. Unknown ones have ended already."""
        for seq_id in seq_ids:
            if (seq := self._index.get(seq_id)) is not None:
                self._finish(seq)

    def pause_sequences(self, seq_ids: Iterable[int]) -> None:
        """Pauses sequences until `resume_sequences`; those that have ended are left alone.

        They keep their tokens; their KV stays in the prefix cache until its blocks are needed.
        """
        for seq_id in seq_ids:
            seq = self._index.get(seq_id)
            if seq is None or seq_id in self._pausing_seqs or seq_id in self._paused_seqs:
                continue
            if seq.status is SequenceStatus.WAITING:
                self._waiting.remove(seq)
                self._set_paused(seq)
                continue
            self._running.remove(seq)
            self._next.forget.append(seq_id)
            if self._is_under_way(seq):
                self._pausing_seqs[seq_id] = seq
            else:
                self._give_up(seq)
                self._set_paused(seq)

    def resume_sequences(self, seq_ids: Iterable[int], rank: int = 0) -> None:
        """Sequences that were paused wait to run again."""
        for seq_id in seq_ids:
            seq = self._paused_seqs.pop(seq_id, None)
            if seq is None:
                # It has ended meanwhile, so its place is free again.
                self._report.free_slots += 1
            else:
                seq.rank = rank
                self._enqueue(seq)

    def recompute(self) -> None:
        """All that runs gives up its KV, with the next plan, and computes its tokens again."""
        self._next.retract = True

    def change_weights(self, version: int, in_flight: InFlight) -> None:
        """The next plan has new weights put in place, and runs with them.

        Nothing that starts from then on finds KV of older weights; what goes on over the change
        is not remembered for others.
        """
        self.interrupt(in_flight, "the weights were replaced, and requests in flight were to end")
        self._next.retract_pooled = any(seq.pools for seq in self._running.others)
        self._next.weight_version = version

    def change_adapter(self, id: str, version: int, in_flight: InFlight) -> None:
        """The next plan has new weights of an adapter put in place, or (0) the adapter removed.

        Nothing that starts from then on finds KV of older ones. Without the adapter the requests
        that need it end.
        """
        self.adapters.change(id, version, in_flight, self._next, self.cancel)

    def interrupt(self, in_flight: InFlight, why: str) -> None:
        """What runs or waits meets a pause or new weights. `why`: what those that end are told."""
        match in_flight:
            case "keep":
                pass
            case "retract":
                self.recompute()
            case "abort":
                self.abort_all(why)
            case _:
                assert_never(in_flight)

    def change_memory(self, lacks: tuple[str, ...], release: tuple[str, ...]) -> None:
        """No step is planned while memory is lacking; the next plan has some of it released.

        With the KV cache goes what prefixes it knows, and all that runs computes its KV again.
        """
        self.lacks = lacks
        self._next.release = release
        if "kv_cache" in release:
            self.recompute()

    def abort_all(self, why: str) -> None:
        """Ends all requests, which keep what they have."""
        for info in self._index.requests():
            self.cancel(Cancel(info.request_id, info.entry_id, "cancelled", "aborted", why))

    @property
    def at_rest(self) -> bool:
        """Paused, with no plan under way and nothing left to give up."""
        return self.paused and not self._sent and not self._next.retracts

    def retract(self) -> None:
        """Takes back the plans under way, whose results will never come.

        Running sequences give up their blocks and wait again, in their order, with the tokens
        that they have. The executor must forget its sequences, too, before the next plan.
        """
        self._next.ended[:0] = [cancel for sent in self._sent for cancel in sent.ended]
        self._sent.clear()
        for seq in list(self._leaving.values()):
            self._release(seq)
        for seq in list(self._pausing_seqs.values()):
            self._give_up(seq)
            self._set_paused(seq)
        for seq in reversed(self._running.clear()):
            self._back_to_waiting(seq)
        self._next.forget.clear()

    def clear(self) -> None:
        """Drops all sequences; what the prefix cache knows, it still knows.

        The executor must forget its sequences, too, before the next plan.
        """
        self.retract()
        self._index.clear()
        self._waiting.clear()
        self._paused_seqs.clear()
        self._next = NextPlan()
        self._report.clear()
        self._step_id = self._draft_rest = 0

    def absorb(self, result: StepResult) -> None:
        """Takes the result of the oldest plan under way.

        Raises:
            ValueError: The result is not that of the oldest plan.
        """
        if not self._sent or self._sent[0].step_id != result.step_id:
            raise ValueError(f"step {result.step_id} came back out of order")
        sent = self._sent.popleft()
        tokens = dict(zip(result.seq_ids, result.token_ids, strict=True))
        accepted = accepted_tokens(result)
        ended = set(compress(result.seq_ids, result.finish_reasons))
        ended.update(prompt.seq_id for prompt in result.pooled)
        rows = list(sent.rows)
        if sent.in_step:
            ends = filter(None, map(self._index.get, ended))
            rows[:0] = [PlannedRow(seq, 1, True, 0) for seq in self._running.absorb(tokens, ends)]
        for seq, num_tokens, samples, num_drafts in rows:
            if seq.status is SequenceStatus.FINISHED:
                self._counters.wasted += num_tokens
                continue
            seq.num_computed += num_tokens
            if seq.max_drafts:
                seq.settle_drafts(num_drafts, accepted.get(seq.seq_id, ()))
            if samples and not seq.pools:
                seq.append_token(tokens[seq.seq_id])
            if seq.num_computed >= seq.next_commit:
                self._commit(seq)
            if samples and seq.seq_id in ended:
                self._finish(seq)
        self._draft_rest = result.draft_rest or self._draft_rest
        self._report.step(result)
        if self._leaving or self._pausing_seqs:
            self._let_go(result.step_id)

    # --- what goes out ------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None when there is nothing to do or enough is under way already."""
        self._expire(now_ns)
        next_plan = self._next
        if len(self._sent) >= (1 if next_plan.waits_for_results else self._steps_ahead):
            return None
        if next_plan.retracts:
            self._retract_running()
        if "kv_cache" in next_plan.release:
            self.cache.flush()
        if next_plan.weight_version:
            self.cache.begin_weight_version(next_plan.weight_version)
            # Where there were none, the executor takes only all of them.
            self.lacks = tuple(tag for tag in self.lacks if tag != "weights")
        rests = self.paused or self.lacks
        drafts = not self._draft_rest
        decision = (
            NOTHING
            if rests
            else decide(self._running, self._waiting, self.cache, self.limits, drafts=drafts)
        )
        if decision.preempted_seqs and self._sent:
            # Blocks in use by a plan under way can't change hands; wait until it is back.
            decision = NOTHING
        self._preempt(decision.preempted_seqs)
        if not (decision.decode_seqs or decision.prefill_seqs or next_plan.cannot_wait):
            return None
        self._next = NextPlan()
        self._step_id += 1
        self._draft_rest = max(self._draft_rest - 1, 0)
        plan, sent = self._builder.build(self._step_id, decision, next_plan, self._counters, now_ns)
        self._sent.append(sent)
        return plan

    def take_report(self) -> Credit | None:
        """What fairness is to be told: places to give back, who was served, and who has left.

        None while nothing needs to be told; to be called after each `absorb`.
        """
        return self._report.take(self.cache.num_free_blocks() * self.limits.block_size)

    def info_of(self, seq_id: int) -> RequestInfo | None:
        """The request of a sequence that waits or runs; None when it has ended."""
        seq = self._index.get(seq_id)
        return seq.info if seq is not None else None

    def take_counters(self) -> Counters:
        """What was done since the last call."""
        counters, self._counters = self._counters, Counters()
        return counters

    def next_deadline_ns(self) -> int | None:
        """When a request's time will be over; None when no request has a deadline."""
        return self._index.next_deadline_ns()

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is under way."""
        return not (self._index or self._leaving or self._sent or self._next.ended)

    def load(self) -> dict[str, int]:
        """Sequences and blocks, for people. Cached blocks are counted at each call."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "set_aside": len(self._paused_seqs),
            "kv_free": self.cache.num_free_blocks(),
            "kv_total": self.cache.num_blocks,
            "kv_cached": self.cache.num_cached_blocks(),
        }

    def check(self) -> None:
        """The conservation check: every block is free or held by exactly who says so.

        Raises:
            AssertionError: The books are wrong.
        """
        check_books(
            self.cache,
            self._index,
            self._running,
            waiting=self._waiting,
            leaving=self._leaving.values(),
            pausing=self._pausing_seqs.values(),
            paused=self._paused_seqs.values(),
            under_way=bool(self._sent),
        )

    # --- inside -------------------------------------------------------------------------------

    def _expire(self, now_ns: int) -> None:
        for request_id, entry_id in self._index.expired(now_ns):
            message = "the request's time budget ran out before it was done"
            self.cancel(Cancel(request_id, entry_id, "expired", "expired", message))

    def _retract_running(self) -> None:
        next_plan = self._next
        for seq in reversed(list(filter(next_plan.retracts_it, self._running))):
            self._running.remove(seq)
            next_plan.forget.append(seq.seq_id)
            self._back_to_waiting(seq)
        next_plan.retracted()

    def _preempt(self, seq_ids: tuple[int, ...]) -> None:
        self._counters.preemptions += len(seq_ids)
        for seq_id in seq_ids:
            seq = self._index[seq_id]
            self._running.remove(seq)
            self._next.forget.append(seq_id)
            # Victims come last first, so the one that was longest in the batch ends up in front.
            self._back_to_waiting(seq)

    def _back_to_waiting(self, seq: Sequence) -> None:
        self._give_up(seq)
        self._waiting.appendleft(seq)

    def _give_up(self, seq: Sequence) -> None:
        """A running sequence gives up its blocks; what it has computed stays in the cache."""
        self._commit(seq)
        self.cache.release(seq.lease)
        seq.preempt()

    def _let_go(self, step_id: int) -> None:
        """The step is back: what leaves or pauses, and no later plan names, gives up its blocks."""
        for seq in [s for s in self._leaving.values() if s.last_step <= step_id]:
            self._release(seq)
        for seq in [s for s in self._pausing_seqs.values() if s.last_step <= step_id]:
            self._give_up(seq)
            self._set_paused(seq)

    def _set_paused(self, seq: Sequence) -> None:
        self._pausing_seqs.pop(seq.seq_id, None)
        self._paused_seqs[seq.seq_id] = seq
        self._report.pause(seq.seq_id)

    def _enqueue(self, seq: Sequence) -> None:
        """Puts a sequence among those that wait, behind those that rank before it."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].rank > seq.rank:
            place -= 1
        self._waiting.insert(place, seq)

    def _is_under_way(self, seq: Sequence) -> bool:
        """Whether a plan whose result is not back names the sequence."""
        return bool(self._sent) and seq.last_step >= self._sent[0].step_id

    def _commit(self, seq: Sequence) -> None:
        """Makes what is computed known to the prefix cache.

        Done after the first step, which frees the source of a copy, when the prompt is computed,
        whenever a block is full, and at the end: not with each token.
        """
        if seq.num_computed == seq.num_cached or seq.is_whole:
            # The first step is not back, so a copy may still be to be made. Or there is no KV.
            return
        self.cache.commit(seq.lease, seq.num_computed)
        seq.set_next_commit(self.limits.block_size)

    def _finish(self, seq: Sequence) -> None:
        """Ends a sequence; its blocks stay until no plan under way names them."""
        was_running = seq.status is SequenceStatus.RUNNING
        seq_id = seq.seq_id
        seq.status = SequenceStatus.FINISHED
        self._index.remove(seq)
        if self._paused_seqs.pop(seq_id, None) is not None:
            self._report.ended.append(seq_id)  # its place has been given back
            return
        if not was_running:
            self._waiting.remove(seq)
            self._report.leave(seq_id)
            return
        if self._pausing_seqs.pop(seq_id, None) is None:
            self._running.remove(seq)
            self._next.forget.append(seq_id)
        self._commit(seq)
        if self._is_under_way(seq):
            self._leaving[seq_id] = seq
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self._leaving.pop(seq.seq_id, None)
        self.cache.release(seq.lease)
        seq.block_ids = []
        self._report.leave(seq.seq_id)
