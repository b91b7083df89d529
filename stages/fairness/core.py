"""Who may run next, and who must pause. The rule and its bounds are in docs/fairness.md."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import ceil

import msgspec

from ...bus.control import Cancel
from ...bus.messages import AdmittedRequest, Credit, Dispatch, ResumeSequences
from ...bus.public import StageTime
from ...config import FairnessConfig
from .fastest_step import FastestStep
from .locality import PrefixChain, PrefixIndex, prefix_chain
from .outcome import Counts, Dispatched
from .queue import FairQueue, Next
from .replicas import Replica, Running, choose_replica
from .tenants import Flow, PriorityClass, Waiting

LEFTOVERS_KEPT = 256
"""Deadlines of requests that wait no longer that may be left, besides the others."""

EXPIRED = "the request's time budget ran out while it waited to run"
HOPELESS = "what is left of the request's time budget is too short for its tokens"


class FairnessCore:
    """Owns the queue, the tenants' counters, the credits, and the turns of what runs.

    `push` what admission lets in and `absorb` what batching reports; then `pop` until it gives
    nothing, then `ask_to_pause`, and `expire`. Times are on the caller's clock, which never goes
    back.
    """

    def __init__(
        self,
        config: FairnessConfig,
        *,
        replicas: int = 1,
        prefixes: Mapping[str, PrefixIndex] | None = None,
        max_draft_tokens: int = 0,
    ) -> None:
        """Args: the settings; how many replicas there may be; what each has probably cached; most
        drafted tokens of a sample in a step."""
        self.counts = Counts()
        self.config = config
        self._several = replicas > 1
        self._prefixes = dict(prefixes or {})
        self._queue = FairQueue(config)
        self._replicas: dict[str, Replica] = {}
        self._of_request: dict[str, list[Waiting]] = {}
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._order = count()
        self._expired: list[Cancel] = []
        self._fastest_step = FastestStep(max_draft_tokens)

    # --- what comes in ------------------------------------------------------------------------

    def push(self, request: AdmittedRequest, now_ns: int, deadline_ns: int | None = None) -> None:
        """Puts a request in the queue."""
        chain: PrefixChain = ()
        if self.config.locality_tokens or self._several:
            chain = prefix_chain(request.token_ids, request.cache_scope)
        waiting = Waiting(request, deque(request.sequences), now_ns, deadline_ns, chain=chain)
        self._add(waiting, now_ns)
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, next(self._order), waiting))
            if len(self._deadlines) > 2 * self.num_queued + LEFTOVERS_KEPT:
                self._deadlines = [entry for entry in self._deadlines if entry[2].specs]
                heapq.heapify(self._deadlines)

    def absorb(self, report: Credit, now_ns: int, replica: str = "") -> list[Running]:
        """Takes a replica's report; returns the sequences that are paused now."""
        reporter = self._replica(replica)
        if not report.keeps_cache:
            reporter.prefixes.clear()
        reporter.credits += report.sequences
        reporter.kv_free = report.kv_free
        if report.step_ns:
            self._fastest_step.add(report.step_ns)
        full = reporter.note_steps(report.steps)
        for seq_id, num_tokens in report.started:
            if (running := reporter.running.get(seq_id)) is not None:
                self._correct_charge(running, num_tokens)
        if full or report.paused or report.ended:
            self._count(reporter)
        paused = [self._pause(reporter, seq_id, now_ns) for seq_id in report.paused]
        for seq_id in report.ended:
            self._end(reporter, seq_id)
        return [running for running in paused if running is not None]

    def cancel(self, cancel: Cancel) -> Cancel:
        """Drops what waits of a request; returns the cancellation to be passed on.

        Each of `replicas_of` the request is to get it.
        """
        all_waiting = self._of_request.pop(cancel.request_id, None)
        if all_waiting is None:
            return cancel
        untouched = all(waiting.untouched for waiting in all_waiting)
        for waiting in all_waiting:
            self._queue.drop(waiting)
        return msgspec.structs.replace(cancel, unstarted=untouched)

    def replicas_of(self, request_id: str) -> list[str]:
        """The replicas that have sequences of a request, or else any one; [] if there is none."""
        if len(self._replicas) < 2:
            return list(self._replicas)
        return [replica.name for replica in self._replicas.values() if replica.has(request_id)] or [
            next(iter(self._replicas))
        ]

    def configure(self, config: FairnessConfig) -> None:
        """Takes new settings, for what waits and runs too. What was served stays served."""
        self.config = config
        self._queue.configure(config)
        for replica in self._replicas.values():
            replica.configure(self._is_preemptible)

    # --- what goes out ------------------------------------------------------------------------

    def pop(self, now_ns: int) -> Dispatched | None:
        """The next dispatch, or None when nothing waits or no replica has a credit.

        A request with more sequences than there are credits is dispatched in parts.
        """
        if not self._queue.num_sequences or not self.credits:
            return None
        for replica in self._replicas.values():
            self._count(replica)
        while (chosen := self._next()) is not None:
            if self._is_hopeless(chosen.waiting, now_ns):
                self.counts.hopeless += 1
                self._expire(chosen.waiting, HOPELESS)
                continue
            to = self._replica_of(chosen.waiting)
            assert to is not None, "what is next has no replica to go to"
            return self._start(chosen, to, now_ns)
        return None

    def ask_to_pause(self, now_ns: int) -> list[tuple[str, Running]]:
        """Sequences that are to pause, each with its replica, for what waits and goes first.

        To be called when `pop` has given nothing: then what waits can only go to full replicas.
        """
        full = [replica for replica in self._replicas.values() if not replica.credits]
        if not self._queue.num_sequences or not full:
            return []
        asked: list[tuple[str, Running]] = []
        first = self._queue.first_class()
        assert first is not None, "sequences wait in no class"
        if self.config.enable_preemption:
            asked += self._preempt(full, first, now_ns)
        least = first.order.first()
        assert least is not None, "a class in the order has nothing that waits"
        for replica in full:
            if self.config.max_timeslice_tokens or (
                self.config.tenant_timeslice_tokens and replica.serves_others(least.tenant)
            ):
                self._count(replica)
                asked += self._end_slices(replica, first, least, now_ns)
        return asked

    def expire(self, now_ns: int) -> list[Cancel]:
        """Drops the requests whose time is over; returns the cancellations to be passed on."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            waiting = heapq.heappop(self._deadlines)[2]
            if waiting.specs:
                self._expire(waiting, EXPIRED)
        expired, self._expired = self._expired, []
        return expired

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do; None when no request in the queue has a deadline."""
        while self._deadlines and not self._deadlines[0][2].specs:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- how it is ----------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests, or parts of them, that wait."""
        return self._queue.num_requests

    @property
    def num_paused(self) -> int:
        """Sequences that are paused and wait to be resumed."""
        return sum(len(replica.paused) for replica in self._replicas.values())

    @property
    def credits(self) -> int:
        """Sequences that the replicas can take."""
        return sum(replica.credits for replica in self._replicas.values())

    def prefixes(self) -> dict[str, PrefixIndex]:
        """What each replica has probably cached, for another core with the same replicas."""
        return self._prefixes

    def served(self) -> dict[tuple[int, str], float]:
        """The counters of all tenants that wait, run or are ahead, by priority and tenant."""
        for replica in self._replicas.values():
            self._count(replica)
        return {
            (priority_class.priority, flow.tenant): flow.counter
            for priority_class in self._queue.classes()
            for flow in priority_class.flows()
        }

    # --- inside: dispatching ------------------------------------------------------------------

    def _replica(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None:
            prefixes = self._prefixes.setdefault(name, PrefixIndex())
            replica = self._replicas[name] = Replica(name, prefixes)
        return replica

    def _add(self, waiting: Waiting, now_ns: int) -> None:
        self._queue.add(waiting, now_ns)
        self._of_request.setdefault(waiting.request.info.request_id, []).append(waiting)

    def _cached(self, waiting: Waiting) -> int:
        return max(
            (replica.prefixes.match(waiting.chain) for replica in self._replicas.values()),
            default=0,
        )

    def _next(self) -> Next | None:
        """What leaves next; None when nothing that waits has a replica to go to.

        A paused sequence is resumed where it was. While that replica is full it is passed by.
        """
        chosen = self._queue.next(self._cached)
        if chosen is None or self._can_go(chosen.waiting):
            return chosen
        return self._queue.next_of(self._can_go)

    def _can_go(self, waiting: Waiting) -> bool:
        return not waiting.resumed or self._replica_of(waiting) is not None

    def _replica_of(self, waiting: Waiting) -> Replica | None:
        if not waiting.resumed:
            return choose_replica(self._replicas.values(), waiting.chain)
        seq_id = waiting.specs[0].seq_id
        replica = next(replica for replica in self._replicas.values() if seq_id in replica.paused)
        return replica if replica.credits else None

    def _start(self, chosen: Next, replica: Replica, now_ns: int) -> Dispatched:
        waiting, priority_class = chosen
        rank, level = int(priority_class.key), priority_class.level(now_ns)
        number = min(replica.credits, len(waiting.specs))
        replica.credits -= number
        specs = self._queue.take(chosen, number, now_ns)
        first_run = waiting.untouched
        waiting.untouched = False
        if not waiting.specs:
            self._forget(waiting)
        request = waiting.request
        resumed = replica.paused.get(specs[0].seq_id) if waiting.resumed else None
        if resumed is not None:
            self.counts.resumes += 1
            self._run(replica, resumed, level)
            message: Dispatch | ResumeSequences = ResumeSequences((specs[0].seq_id,), rank)
        else:
            for spec in specs:
                self._run(replica, Running(spec, waiting), level)
            if first_run:
                self._charge_prompt(waiting, replica, specs[0].seq_id)
            held = StageTime(stage="fairness", start_ns=waiting.arrived_ns, end_ns=now_ns)
            message = Dispatch(
                info=msgspec.structs.replace(request.info, stages=(*request.info.stages, held)),
                token_ids=request.token_ids,
                sampling=request.sampling,
                sequences=specs,
                priority=request.priority,
                cache_scope=request.cache_scope,
                rank=rank,
                prediction=request.prediction,
            )
        return Dispatched(
            *(replica.name, message, request, waiting.arrived_ns, waiting.deadline_ns, resumed),
            last=not waiting.specs,
            passed_by=self._queue.passed_by(waiting),
        )

    def _run(self, replica: Replica, running: Running, level: float) -> None:
        preemptible = self._is_preemptible(running)
        replica.start(running, level, next(self._order), preemptible=preemptible)

    def _charge_prompt(self, waiting: Waiting, replica: Replica, seq_id: int) -> None:
        """The first sample is charged the whole prompt in advance; its siblings share it.

        In full, whatever is probably cached: charging less would let a tenant have more places
        than the bound allows before the guess is found wrong.
        """
        running = replica.running[seq_id]
        running.charged = len(waiting.request.token_ids)
        running.flow.charge(running.charged * self.config.prefill_weight)
        replica.prefixes.add(waiting.chain)

    def _forget(self, waiting: Waiting) -> None:
        request_id = waiting.request.info.request_id
        others = [other for other in self._of_request[request_id] if other is not waiting]
        if others:
            self._of_request[request_id] = others
        else:
            del self._of_request[request_id]

    # --- inside: what runs --------------------------------------------------------------------

    def _correct_charge(self, running: Running, num_tokens: int) -> None:
        """What a start really computed replaces what was charged; nobody pays for it twice."""
        if running.started:
            self.counts.recomputed_tokens += num_tokens - 1
            return
        running.started = True
        running.flow.charge((num_tokens - running.charged) * self.config.prefill_weight)

    def _count(self, replica: Replica) -> None:
        """Charges the tokens that were generated since this was last done."""
        price, tokens = self.config.decode_weight, self.counts.tokens
        slice_tokens = self.config.max_timeslice_tokens
        for running, number in replica.counted():
            running.flow.charge(number * price)
            priority = running.request.priority
            tokens[priority] += number
            running.num_tokens += number
            running.in_slice += number
            if priority >= self.config.high_priority_threshold:
                continue
            replica.made_since_change += number
            if 0 < slice_tokens <= running.in_slice and not running.leaving:
                replica.due[running.spec.seq_id] = running
        most = self.config.tenant_timeslice_tokens * len(replica.running)
        replica.made_since_change = min(replica.made_since_change, most)

    def _pause(self, replica: Replica, seq_id: int, now_ns: int) -> Running | None:
        running = replica.pause(seq_id, now_ns)
        if running is None:
            return None
        self.counts.preemptions += running.preempted
        self.counts.yields += not running.preempted
        self._add(
            Waiting(
                running.request,
                deque((running.spec,)),
                now_ns if running.behind else running.arrived_ns,
                running.deadline_ns,
                arrived_ns=running.arrived_ns,
                resumed=True,
            ),
            now_ns,
        )
        # After it waits again, so that its tenant is not taken for idle.
        self._queue.back(running.flow)
        return running

    def _end(self, replica: Replica, seq_id: int) -> None:
        was_running = seq_id in replica.running
        running = replica.end(seq_id)
        if running is None:
            return
        if was_running:
            self._queue.back(running.flow)
            return
        request_id = running.request.info.request_id
        for waiting in self._of_request.get(request_id, []):
            if waiting.resumed and waiting.specs[0].seq_id == seq_id:
                self._forget(waiting)
                self._queue.drop(waiting)
                return

    def _is_preemptible(self, running: Running) -> bool:
        config = self.config
        low = running.request.priority < config.high_priority_threshold
        return config.enable_preemption and low and running.preemptions < config.max_preemptions

    def _preempt(
        self, replicas: Sequence[Replica], first: PriorityClass, now_ns: int
    ) -> list[tuple[str, Running]]:
        """Room for requests of high priority, at the cost of strictly lower effective ones."""
        asked: list[tuple[str, Running]] = []
        if first.priority < self.config.high_priority_threshold:
            return asked
        level = first.level(now_ns)
        while self._num_leaving < first.num_sequences:
            lowest = ((replica, replica.lowest()) for replica in replicas)
            able = [(replica, seq) for replica, seq in lowest if seq and seq.level < level]
            if not able:
                break
            replica, victim = min(able, key=lambda pair: (pair[1].level, -pair[1].order))
            replica.ask(victim, now_ns, preempted=True, behind=False)
            asked.append((replica.name, victim))
        return asked

    def _end_slices(
        self, replica: Replica, first: PriorityClass, least: Flow, now_ns: int
    ) -> list[tuple[str, Running]]:
        """Room where a slice is used up, somebody else goes first, and going on costs little.

        A tenant that has no place at all gets one even where going on costs all.
        """
        asked: list[tuple[str, Running]] = []
        costly: list[Running] = []
        staying: set[Flow] = set()
        for running in self._used_up(replica, least):
            if running.flow in staying:
                continue
            if not self._gives_way(running, first, least, now_ns):
                staying.add(running.flow)
                continue
            behind = least is running.flow
            if replica.keeps(running, before=least.waiting_tokens if behind else 0):
                asked.append(self._end_slice(replica, running, now_ns, behind=behind))
            elif running.preemptions < self.config.max_preemptions:
                costly.append(running)
        if costly and not (asked or least.num_running or self._num_leaving):
            slice_tokens = self.config.tenant_timeslice_tokens
            others = [running for running in costly if 0 < slice_tokens <= running.in_slice]
            others = [running for running in others if running.request.tenant != least.tenant]
            if others:
                running = min(others, key=lambda seq: seq.num_tokens)
                asked.append(self._end_slice(replica, running, now_ns, preempted=True))
        return asked

    def _used_up(self, replica: Replica, least: Flow) -> Iterator[Running]:
        """Sequences whose slice is, for what waits of `least`.

        A tenant's slices count together: `tenant_timeslice_tokens` made by all of them are one
        that is used up, be it of a sequence that has made fewer. So a full batch has places for a
        newcomer at once, and sequences change places no oftener for it.
        """
        if self.config.max_timeslice_tokens:
            yield from list(replica.due.values())
        slice_tokens = self.config.tenant_timeslice_tokens
        if not slice_tokens or replica.made_since_change < slice_tokens:
            return
        others = [running for running in replica.running.values() if self._may_end(running, least)]
        others.sort(key=lambda running: -running.in_slice)
        for running in others:
            if replica.made_since_change < slice_tokens:
                return
            if not running.leaving:
                yield running

    def _may_end(self, running: Running, least: Flow) -> bool:
        """Whether a sequence's slice may end for another tenant: it has made a token in it."""
        low = running.request.priority < self.config.high_priority_threshold
        return low and running.in_slice > 0 and running.request.tenant != least.tenant

    def _end_slice(
        self,
        replica: Replica,
        running: Running,
        now_ns: int,
        *,
        behind: bool = False,
        preempted: bool = False,
    ) -> tuple[str, Running]:
        replica.ask(running, now_ns, preempted=preempted, behind=behind)
        left = replica.made_since_change - self.config.tenant_timeslice_tokens
        replica.made_since_change = max(0, left)
        return replica.name, running

    def _gives_way(self, running: Running, first: PriorityClass, least: Flow, now_ns: int) -> bool:
        """Whether somebody else would get the place of a sequence that paused now."""
        if not first.would_pass(running.request.priority, now_ns):
            return False
        flow = running.flow
        number = least.num_sequences - self._num_leaving
        if flow is not least and flow.priority_class is first:
            # So many of theirs, until they are level.
            price = self.config.prefill_weight * len(least.first().request.token_ids) + 1
            ahead = (flow.counter - least.counter) * least.weight
            number = min(number, ceil(ahead / price) - self._num_leaving)
        return number > 0

    @property
    def _num_leaving(self) -> int:
        return sum(replica.num_leaving for replica in self._replicas.values())

    # --- inside: time -------------------------------------------------------------------------

    def _expire(self, waiting: Waiting, message: str) -> None:
        info = waiting.request.info
        cancel = Cancel(info.request_id, info.entry_id, "expired", "expired", message)
        self._expired.append(self.cancel(cancel))

    def _is_hopeless(self, waiting: Waiting, now_ns: int) -> bool:
        """Whether a request can't be done in its time although it had the device for itself."""
        if waiting.deadline_ns is None or not waiting.untouched or not self.config.expire_hopeless:
            return False
        least_ns = self._fastest_step.least_ns(waiting.request.sampling)
        return now_ns + least_ns > waiting.deadline_ns
