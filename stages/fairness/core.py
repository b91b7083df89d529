"""Which sequences run next, and which must pause. docs/fairness.md has the rule and its bounds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from math import ceil

import msgspec

from ...bus.control import Cancel
from ...bus.messages import AdmittedRequest, Credit, RequestInfo, ResumeSequences
from ...bus.parts.handover import HandoverRoute
from ...bus.public import StageTime
from ...config import FairnessConfig, ReplicaRole
from ...store.service import LaneService
from ..lazy_heap import LazyHeap
from .exchange import Exchange
from .fastest_step import FastestStep
from .handovers import Handovers
from .queue import FairQueue, Flow, PriorityClass, Running, Waiting
from .replicas import PrefixIndex, Replica, choose_replica, prefix_chain

EXPIRED = "the request's time budget ran out while it waited to run"
HOPELESS = "the rest of the request's time budget is too short for its tokens"


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """A message for a replica, with data for telemetry and time budgets.

    Attributes:
        resumed: The sequence that is resumed; None if sequences start.
        last: No sequence of the request waits any more for its first run.
        passed_by: Dispatches while it waited: of other priorities, of other tenants, of its own.
    """

    replica: str
    message: AdmittedRequest | ResumeSequences
    request: AdmittedRequest
    arrived_ns: int
    deadline_ns: int | None
    resumed: Running | None
    last: bool
    passed_by: tuple[int, int, int]


class Counts(msgspec.Struct):
    """Events since the start, for telemetry. `tokens`: generated ones, by priority."""

    preemptions: int = 0
    yields: int = 0
    resumes: int = 0
    handovers: int = 0
    recomputed_tokens: int = 0
    hopeless: int = 0
    tokens: Counter[int] = msgspec.field(default_factory=Counter)


class FairnessCore:
    """Owns the queue, the tenants' counters, the replicas' credits, and time slices.

    Use: `push` admitted requests and `absorb` batching's reports; then `pop` until it returns None,
    then `ask_to_pause` and `expire`. Times are on the caller's clock, which never goes back.
    """

    def __init__(
        self,
        config: FairnessConfig,
        *,
        replicas: int = 1,
        max_draft_tokens: int = 0,
        roles: Sequence[ReplicaRole] = (),
        lane: str = "0",
    ) -> None:
        """Args: the settings; most replicas; most drafted tokens of a sample in a step; the
        replicas' roles, if they have any; the lane's name."""
        self.counts = Counts()
        self._handovers = Handovers(roles)
        self.config = config
        self._several = replicas > 1
        self._max_draft_tokens = max_draft_tokens
        self._prefixes: dict[str, PrefixIndex] = {}
        self._order = count()
        self.exchange = Exchange(lane, on=bool(config.exchange_interval_s))
        self.reset()

    def reset(self, epoch: int = 0) -> None:
        """Drop all requests and replicas; keep counts, and what each replica may have cached."""
        self.exchange.begin(epoch)
        self._queue = FairQueue(self.config, self.exchange)
        self._replicas: dict[str, Replica] = {}
        self._of_request: dict[str, list[Waiting]] = {}
        self._deadlines: LazyHeap[Waiting] = LazyHeap(lambda _, waiting: bool(waiting.specs))
        self._expired: list[Cancel] = []
        self._handovers.clear()
        self._fastest_step = FastestStep(self._max_draft_tokens)

    # --- inputs -------------------------------------------------------------------------------

    def push(self, request: AdmittedRequest, now_ns: int, deadline_ns: int | None = None) -> None:
        """Put a request in the queue."""
        waiting = Waiting(request, deque(request.sequences), now_ns, now_ns, deadline_ns)
        if self.config.locality_tokens or self._several:
            waiting.chain = prefix_chain(request.prompt.token_ids, request.cache_scope)
        self._add(waiting, now_ns)
        if deadline_ns is not None:
            self._deadlines.push(deadline_ns, waiting)

    def absorb(self, report: Credit, now_ns: int, replica: str = "") -> list[Running]:
        """Apply a replica's report; return the sequences that are paused now."""
        reporter = self._replicas.get(replica)
        if reporter is None:
            prefixes = self._prefixes.setdefault(replica, PrefixIndex())
            reporter = self._replicas[replica] = Replica(replica, prefixes)
        if not report.keeps_cache:
            reporter.prefixes.clear()
        reporter.credits += report.sequences
        reporter.kv_free = report.kv_free
        if report.step_ns:
            self._fastest_step.add(report.step_ns)
        is_full = reporter.note_steps(report.steps)
        for seq_id, num_tokens in report.started:
            self._arrive(reporter, seq_id)
            if (running := reporter.running.get(seq_id) or reporter.gone.get(seq_id)) is not None:
                continues = bool(running.successor) and running.successor == replica
                self._correct_charge(running, num_tokens, continues=continues)
        if report.left:
            self._leave(reporter, report.left)
        if is_full or report.paused or report.ended:
            self._count(reporter)
        paused = [self._pause(reporter, seq_id, now_ns) for seq_id in report.paused]
        for seq_id in report.ended:
            self._end(reporter, seq_id)
        return [running for running in paused if running is not None]

    def set_roles(self, roles: Sequence[ReplicaRole]) -> None:
        """Replace the replicas' roles. Sequences stay where they run."""
        self._handovers.configure(roles)

    def cancel(self, cancel: Cancel) -> Cancel:
        """Drop a request's waiting sequences; return the cancellation for `replicas_of` it."""
        all_waiting = self._of_request.pop(cancel.request_id, None)
        if all_waiting is None:
            return cancel
        unstarted = all(waiting.untouched for waiting in all_waiting)
        for waiting in all_waiting:
            self._queue.drop(waiting)
        return msgspec.structs.replace(cancel, unstarted=unstarted)

    def replicas_of(self, request_id: str) -> list[str]:
        """Return the replicas with sequences of a request, or else any one; [] if there is none."""
        having = [name for name, each in self._replicas.items() if each.has(request_id)]
        return having or list(self._replicas)[:1]

    def configure(self, config: FairnessConfig) -> None:
        """Apply settings, also to waiting and running sequences. Service stays counted."""
        self.config = config
        self.exchange.switch(bool(config.exchange_interval_s))
        self._queue.configure(config)
        for replica in self._replicas.values():
            replica.configure(self._is_preemptible)

    def report_service(self, elapsed_s: float) -> LaneService | None:
        """Return this lane's service for the other lanes, as `Exchange.report`."""
        for each in self._replicas.values():
            self._count(each)
        return self.exchange.report(elapsed_s, self.config.exchange_interval_s)

    def apply_service(self, tables: Iterable[LaneService]) -> list[str]:
        """Count what other lanes have served since the last call; return lanes long silent."""
        self._queue.serve_elsewhere(self.exchange.news(tables))
        return self.exchange.silent()

    # --- outputs ------------------------------------------------------------------------------

    def pop(self, now_ns: int) -> Dispatched | None:
        """Return the next dispatch; None if nothing waits or no replica has a credit.

        A request with more sequences than there are credits is dispatched in parts.
        """
        if not (self.num_queued and self.credits):
            return None
        for each in self._replicas.values():
            self._count(each)
        while (waiting := self._next()) is not None:
            if not self._is_hopeless(waiting, now_ns):
                replica = self._replica_of(waiting)
                assert replica is not None, "the next request has no replica to go to"
                return self._start(waiting, replica, now_ns)
            self.counts.hopeless += 1
            self._expire(waiting.request.info, HOPELESS)
        return None

    def ask_to_pause(self, now_ns: int) -> list[Running]:
        """Return sequences that must pause, so that requests that go first find room.

        Call it when `pop` has returned None: then the next request can only go to full replicas.
        """
        full = [replica for replica in self._replicas.values() if not replica.credits]
        first = self._queue.first_class()
        if first is None or not full:
            return []
        asked: list[Running] = []
        if self.config.enable_preemption:
            asked += self._preempt(full, first, now_ns)
        least = first.order.first()
        assert least is not None, "a class in the order has no waiting tenant"
        for replica in full:
            if self.config.max_timeslice_tokens or (
                self.config.tenant_timeslice_tokens and replica.serves_others(least.tenant)
            ):
                self._count(replica)
                asked += self._end_slices(replica, first, least, now_ns)
        return asked

    def expire(self, now_ns: int) -> list[Cancel]:
        """Drop requests whose deadline is over; return the cancellations to pass on."""
        for waiting in self._deadlines.pop_until(now_ns):
            self._expire(waiting.request.info, EXPIRED)
        expired, self._expired = self._expired, []
        return expired

    def next_deadline_ns(self) -> int | None:
        """Return the earliest deadline of a waiting request; None if there is none."""
        return self._deadlines.first_key()

    def take_releases(self) -> dict[str, list[int]]:
        """As `Handovers.take_releases`."""
        return self._handovers.take_releases()

    # --- state --------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Waiting requests, or parts of them."""
        return self._queue.num_requests

    @property
    def num_paused(self) -> int:
        """Paused sequences that wait to be resumed."""
        return sum(len(replica.paused) for replica in self._replicas.values())

    @property
    def roles(self) -> tuple[ReplicaRole, ...]:
        """The replicas' roles; empty if each does all."""
        return self._handovers.roles

    @property
    def credits(self) -> int:
        """Sequences that the replicas can take."""
        return sum(replica.credits for replica in self._replicas.values())

    # --- dispatching --------------------------------------------------------------------------

    def _add(self, waiting: Waiting, now_ns: int) -> None:
        self._queue.add(waiting, now_ns)
        self._of_request.setdefault(waiting.request.info.request_id, []).append(waiting)

    def _cached(self, waiting: Waiting) -> int:
        matches = (replica.prefixes.match(waiting.chain) for replica in self._replicas.values())
        return max(matches, default=0)

    def _next(self) -> Waiting | None:
        """Return the request that leaves next; None if none has a replica to go to.

        A paused sequence resumes on its own replica. While that is full, other requests pass it.
        """
        waiting = self._queue.next(self._cached)
        if waiting is None or self._can_go(waiting):
            return waiting
        if not (self._may_start or self.num_paused):
            return None
        return self._queue.next_of(self._can_go)

    def _can_go(self, waiting: Waiting) -> bool:
        if waiting.paused is None:
            return self._may_start
        return self._replica_of(waiting) is not None

    @property
    def _starters(self) -> Collection[Replica]:
        replicas = self._replicas.values()
        return self._handovers.starters(replicas) if self._handovers else replicas

    @property
    def _may_start(self) -> bool:
        """Whether a prompt may start on some replica."""
        return any(replica.credits for replica in self._starters)

    def _replica_of(self, waiting: Waiting) -> Replica | None:
        if waiting.paused is None:
            return choose_replica(self._starters, waiting.chain)
        replica = self._replicas[waiting.paused.replica]
        return replica if replica.credits else None

    def _start(self, waiting: Waiting, replica: Replica, now_ns: int) -> Dispatched:
        priority_class, request = waiting.flow.priority_class, waiting.request
        rank, level = int(priority_class.key), priority_class.level(now_ns)
        number = min(replica.credits, len(waiting.specs))
        replicas = self._replicas.values()
        # A paused sequence has a place where it continues, or needs none.
        starts = waiting.paused is None
        leaves = starts and request.info.pooling is None and self._leaves(replica)
        if leaves:
            number = min(number, self._handovers.room(replicas))
        replica.credits -= number
        specs = self._queue.take(waiting, number, now_ns)
        if not waiting.specs:
            self._forget(waiting)
        if waiting.paused is not None:
            self.counts.resumes += 1
            self._run(replica, waiting.paused, level, rank)
            message: AdmittedRequest | ResumeSequences = ResumeSequences((specs[0].seq_id,), rank)
        else:
            successors: list[int] = []
            for spec in specs:
                running = Running(
                    spec=spec,
                    request=request,
                    flow=waiting.flow,
                    arrived_ns=waiting.arrived_ns,
                    deadline_ns=waiting.deadline_ns,
                    num_tokens=len(request.prompt.token_ids) + len(spec.generated),
                    chain=waiting.chain,
                )
                self._run(replica, running, level, rank)
                if leaves:
                    successors.append(self._handovers.promise(running, replicas))
                if waiting.untouched:
                    # Charge the first sample the whole prompt in advance; its siblings share it.
                    # Cached tokens are charged too: charging less would let a tenant have more
                    # places than the bound allows before the guess proves wrong.
                    waiting.untouched = False
                    running.charged = len(request.prompt.token_ids)
                    running.flow.charge(running.charged * self.config.prefill_weight)
                    replica.prefixes.add(waiting.chain)
            held = StageTime(stage="fairness", start_ns=waiting.arrived_ns, end_ns=now_ns)
            info = msgspec.structs.replace(request.info, queued=held)
            parts = request.parts
            if successors:
                parts = HandoverRoute(tuple(successors)).replaced_in(parts)
            message = msgspec.structs.replace(
                request, info=info, sequences=specs, rank=rank, parts=parts
            )
        return Dispatched(
            replica=replica.name,
            message=message,
            request=request,
            arrived_ns=waiting.arrived_ns,
            deadline_ns=waiting.deadline_ns,
            resumed=waiting.paused,
            last=not waiting.specs,
            passed_by=self._queue.passed_by(waiting),
        )

    def _leaves(self, replica: Replica) -> bool:
        """Whether sequences that start on a replica continue elsewhere."""
        return bool(self._handovers) and self._handovers.leaves(replica, self._replicas.values())

    def _run(self, replica: Replica, running: Running, level: float, rank: int) -> None:
        running.rank = rank
        replica.start(running, level, next(self._order), preemptible=self._is_preemptible(running))

    def _forget(self, waiting: Waiting) -> None:
        request_id = waiting.request.info.request_id
        self._of_request[request_id].remove(waiting)
        if not self._of_request[request_id]:
            del self._of_request[request_id]

    # --- handovers ----------------------------------------------------------------------------

    def _leave(self, giver: Replica, seq_ids: Iterable[int]) -> None:
        """Apply a replica's report that it has handed sequences over."""
        for seq_id in seq_ids:
            if (running := giver.running.get(seq_id)) is not None:
                self._arrive(self._replicas[running.successor], seq_id)
        self._count(giver)
        for seq_id in seq_ids:
            giver.gone.pop(seq_id, None)

    def _arrive(self, replica: Replica, seq_id: int) -> None:
        """Let a sequence run where it was expected, if it was: the first report of either side."""
        if (running := replica.expected.pop(seq_id, None)) is None:
            return
        self._replicas[running.replica].let_go(running)
        running.giver = running.replica
        self.counts.handovers += 1
        self._run(replica, running, running.level, running.rank)

    # --- charging -----------------------------------------------------------------------------

    def _correct_charge(self, running: Running, num_tokens: int, *, continues: bool) -> None:
        """Replace the charge by the tokens that a start computed. Recomputing isn't charged.

        `continues`: the sequence was charged where it began, and starts where it continues.
        """
        if continues:
            self._handovers.release(running)
        if continues or running.started:
            self.counts.recomputed_tokens += num_tokens - 1
            return
        running.started = True
        running.flow.charge((num_tokens - running.charged) * self.config.prefill_weight)

    def _count(self, replica: Replica) -> None:
        """Charge the tokens generated since the last call."""
        slice_tokens = self.config.max_timeslice_tokens
        for running, number in replica.counted():
            running.flow.charge(number * self.config.decode_weight)
            self.counts.tokens[running.request.priority] += number
            running.num_tokens += number
            running.in_slice += number
            if self._is_low(running):
                replica.made_since_change += number
                due = 0 < slice_tokens <= running.in_slice and not running.leaving
                if due and running.replica == replica.name:
                    replica.due[running.spec.seq_id] = running
        most = self.config.tenant_timeslice_tokens * len(replica.running)
        replica.made_since_change = min(replica.made_since_change, most)

    # --- running sequences --------------------------------------------------------------------

    def _pause(self, replica: Replica, seq_id: int, now_ns: int) -> Running | None:
        running = replica.pause(seq_id, now_ns)
        if running is None:
            return None
        self.counts.preemptions += running.preempted
        self.counts.yields += not running.preempted
        waiting = Waiting(
            running.request,
            deque((running.spec,)),
            since_ns=now_ns if running.behind else running.arrived_ns,
            arrived_ns=running.arrived_ns,
            deadline_ns=running.deadline_ns,
            paused=running,
            untouched=False,
        )
        self._add(waiting, now_ns)
        # After the sequence waits again, so that its tenant doesn't count as idle.
        self._queue.back(running.flow)
        return running

    def _end(self, replica: Replica, seq_id: int) -> None:
        self._arrive(replica, seq_id)
        was_running = seq_id in replica.running
        running = replica.end(seq_id)
        if running is None:
            return
        self._handovers.release(running)
        self._handovers.break_promise(running, self._replicas)
        if was_running:
            self._queue.back(running.flow)
            return
        for waiting in self._of_request.get(running.request.info.request_id, []):
            if waiting.paused is running:
                self._forget(waiting)
                self._queue.drop(waiting)
                return

    def _is_low(self, running: Running) -> bool:
        return running.request.priority < self.config.high_priority_threshold

    def _is_preemptible(self, running: Running) -> bool:
        config = self.config
        may_pause = running.preemptions < config.max_preemptions
        return config.enable_preemption and self._is_low(running) and may_pause

    @property
    def _num_leaving(self) -> int:
        return sum(replica.num_leaving for replica in self._replicas.values())

    def _preempt(self, replicas: list[Replica], first: PriorityClass, now_ns: int) -> list[Running]:
        """Make room for a class of high priority, at the cost of lower effective priorities."""
        asked: list[Running] = []
        if first.priority < self.config.high_priority_threshold:
            return asked
        level = first.level(now_ns)
        while self._num_leaving < first.num_sequences:
            lowest = [running for replica in replicas if (running := replica.lowest()) is not None]
            victim = min(lowest, key=lambda running: (running.level, -running.order), default=None)
            if victim is None or victim.level >= level:
                break
            self._replicas[victim.replica].ask_to_pause(victim, now_ns, preempted=True)
            asked.append(victim)
        return asked

    def _end_slices(
        self, replica: Replica, first: PriorityClass, least: Flow, now_ns: int
    ) -> list[Running]:
        """Make room where a slice is used up, another tenant goes first, and KV stays cached.

        A tenant without any place gets one even at the cost of cached KV.
        """
        asked: list[Running] = []
        costly: list[Running] = []
        staying: set[Flow] = set()

        def ask(running: Running, *, behind: bool = False, preempted: bool = False) -> None:
            replica.ask_to_pause(running, now_ns, preempted=preempted, behind=behind)
            left = replica.made_since_change - self.config.tenant_timeslice_tokens
            replica.made_since_change = max(0, left)
            asked.append(running)

        for running in self._used_up(replica, least):
            if running.flow in staying:
                continue
            if not self._gives_way(running, first, least, now_ns):
                staying.add(running.flow)
                continue
            behind = least is running.flow
            if replica.keeps_kv(running, before=least.waiting_tokens if behind else 0):
                ask(running, behind=behind)
            elif running.preemptions < self.config.max_preemptions:
                costly.append(running)
        if costly and not (asked or least.num_running or self._num_leaving):
            slice_tokens = self.config.tenant_timeslice_tokens
            others = [
                running
                for running in costly
                if 0 < slice_tokens <= running.in_slice and running.request.tenant != least.tenant
            ]
            if others:
                ask(min(others, key=lambda running: running.num_tokens), preempted=True)
        return asked

    def _used_up(self, replica: Replica, least: Flow) -> Iterator[Running]:
        """Yield sequences whose slice is used up, seen from the waiting tenant `least`.

        Between tenants, all slices count together: `tenant_timeslice_tokens` made by all sequences
        use up one slice, even of a sequence that has made fewer. So a newcomer finds a place in a
        full batch at once, and sequences don't change places more often.
        """
        if self.config.max_timeslice_tokens:
            yield from list(replica.due.values())
        slice_tokens = self.config.tenant_timeslice_tokens
        if not slice_tokens or replica.made_since_change < slice_tokens:
            return
        others = [
            running
            for running in replica.running.values()
            if self._is_low(running)
            and running.in_slice > 0
            and running.request.tenant != least.tenant
        ]
        for running in sorted(others, key=lambda running: -running.in_slice):
            if replica.made_since_change < slice_tokens:
                return
            if not running.leaving:
                yield running

    def _gives_way(self, running: Running, first: PriorityClass, least: Flow, now_ns: int) -> bool:
        """Whether another request would get the place of a sequence that paused now."""
        if not first.would_pass(running.request.priority, now_ns):
            return False
        flow = running.flow
        number = least.num_sequences - self._num_leaving
        if flow is not least and flow.priority_class is first:
            # Sequences of the least served tenant that start before both tenants are level.
            price = self.config.prefill_weight * len(least.first().request.prompt.token_ids) + 1
            ahead = (flow.counter - least.counter) * least.weight
            number = min(number, ceil(ahead / price) - self._num_leaving)
        return number > 0

    # --- deadlines ----------------------------------------------------------------------------

    def _expire(self, info: RequestInfo, message: str) -> None:
        cancel = Cancel(info.request_id, info.entry_id, "expired", "expired", message)
        self._expired.append(self.cancel(cancel))

    def _is_hopeless(self, waiting: Waiting, now_ns: int) -> bool:
        """Whether a request would miss its deadline even alone on the device."""
        if waiting.deadline_ns is None or not waiting.untouched or not self.config.expire_hopeless:
            return False
        return now_ns + self._fastest_step.least_ns(waiting.request) > waiting.deadline_ns
