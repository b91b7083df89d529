"""Decides which sequences run next, and which must pause. docs/fairness.md has the rule.

AdmittedRequest ──► push ───► FairQueue ──► pop ────► Dispatched, to a replica with a credit
Credit ───────────► absorb ──► Replica ───► pauses ──► sequences that must pause
Cancel ───────────► cancel                  expire ──► requests whose deadline is over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from ...bus.control import Cancel
from ...bus.messages import (
    AdmittedRequest,
    Credit,
    RequestInfo,
    ResumeSequences,
)
from ...bus.public import StageTime
from ...bus.sections import with_sections
from ...config import FairnessConfig, ReplicaRole
from ..lazy_heap import LazyHeap
from ..parts import Kind, Parts
from .parts import Part, make_parts
from .queue import FairQueue, Running, Waiting
from .replicas import Replica, choose_replica
from .state import Dispatched, FairnessState

EXPIRED = "the request's time budget ran out while it waited to run"
HOPELESS = "the rest of the request's time budget is too short for its tokens"


class FairnessCore(FairnessState):
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
        super().__init__(config, has_several=replicas > 1)
        self._parts = Parts(Part, make_parts(self, roles, lane, max_draft_tokens))
        self.reset()

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of a class."""
        return self._parts.get(kind)

    def reset(self, epoch: int = 0) -> None:
        """Drop all requests and replicas; keep counts."""
        self.queue = FairQueue(self.config)
        self.replicas = {}
        self._of_request: dict[str, list[Waiting]] = {}
        self._deadlines: LazyHeap[Waiting] = LazyHeap(lambda _, waiting: bool(waiting.specs))
        self._expired: list[Cancel] = []
        for hook in self._parts.reset:
            hook(epoch)

    # --- inputs -------------------------------------------------------------------------------

    def push(self, request: AdmittedRequest, now_ns: int, deadline_ns: int | None = None) -> None:
        """Put a request in the queue."""
        waiting = Waiting(request, deque(request.sequences), now_ns, now_ns, deadline_ns)
        for hook in self._parts.pushed:
            hook(waiting)
        self._add(waiting, now_ns)
        if deadline_ns is not None:
            self._deadlines.push(deadline_ns, waiting)

    def absorb(self, report: Credit, now_ns: int, replica: str = "") -> list[Running]:
        """Apply a replica's report; return the sequences that are paused now."""
        reporter = self.replicas.get(replica)
        if reporter is None:
            reporter = self.replicas[replica] = Replica(replica)
            for hook in self._parts.joined:
                hook(reporter)
        for hook in self._parts.absorbed:
            hook(reporter, report)
        reporter.credits += report.sequences
        reporter.kv_free = report.kv_free
        is_full = reporter.note_steps(report.steps)
        for seq_id, num_tokens in report.started:
            for hook in self._parts.reported:
                hook(reporter, seq_id)
            if (running := reporter.running.get(seq_id) or reporter.gone.get(seq_id)) is not None:
                continues = bool(running.successor) and running.successor == replica
                self._correct_charge(running, num_tokens, continues=continues)
        for hook in self._parts.left if report.left else ():
            hook(reporter, report.left)
        if is_full or report.paused or report.ended:
            self.count(reporter)
        paused = [self._pause(reporter, seq_id, now_ns) for seq_id in report.paused]
        for seq_id in report.ended:
            self._end(reporter, seq_id)
        return [running for running in paused if running is not None]

    def cancel(self, cancel: Cancel) -> Cancel:
        """Drop a request's waiting sequences; return the cancellation for `replicas_of` it."""
        all_waiting = self._of_request.pop(cancel.request_id, None)
        if all_waiting is None:
            return cancel
        unstarted = all(waiting.untouched for waiting in all_waiting)
        for waiting in all_waiting:
            self.queue.drop(waiting)
        return msgspec.structs.replace(cancel, unstarted=unstarted)

    def replicas_of(self, request_id: str) -> list[str]:
        """Return the replicas with sequences of a request, or else any one; [] if there is none."""
        having = [name for name, each in self.replicas.items() if each.has(request_id)]
        return having or list(self.replicas)[:1]

    def configure(self, config: FairnessConfig) -> None:
        """Apply settings, also to waiting and running sequences. Service stays counted."""
        self.config = config
        self.queue.configure(config)
        for hook in self._parts.configure:
            hook(config)

    # --- outputs ------------------------------------------------------------------------------

    def pop(self, now_ns: int) -> Dispatched | None:
        """Return the next dispatch; None if nothing waits or no replica has a credit.

        A request with more sequences than there are credits is dispatched in parts.
        """
        if not (self.num_queued and self.credits):
            return None
        for each in self.replicas.values():
            self.count(each)
        while (waiting := self._next()) is not None:
            if not any(hook(waiting, now_ns) for hook in self._parts.is_hopeless):
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
        full = [replica for replica in self.replicas.values() if not replica.credits]
        first = self.queue.first_class()
        asked = [running for hook in self._parts.yields for running in hook(now_ns)]
        if first is None or not full:
            return asked
        for hook in self._parts.pauses:
            asked += hook(full, first, now_ns)
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

    # --- dispatching --------------------------------------------------------------------------

    def _add(self, waiting: Waiting, now_ns: int) -> None:
        self.queue.add(waiting, now_ns)
        self._of_request.setdefault(waiting.request.info.request_id, []).append(waiting)

    def _cached(self, waiting: Waiting) -> int:
        matches = (replica.prefixes.match(waiting.chain) for replica in self.replicas.values())
        return max(matches, default=0)

    def _next(self) -> Waiting | None:
        """Return the request that leaves next; None if none has a replica to go to.

        A paused sequence resumes on its own replica. While that is full, other requests pass it.
        """
        waiting = self.queue.next(self._cached)
        if waiting is None or self._can_go(waiting):
            return waiting
        if not (self._may_start or self.num_paused):
            return None
        return self.queue.next_of(self._can_go)

    def _can_go(self, waiting: Waiting) -> bool:
        if not all(hook(waiting) for hook in self._parts.may_run):
            return False
        if waiting.paused is None:
            return self._may_start
        return self._replica_of(waiting) is not None

    @property
    def _starters(self) -> Collection[Replica]:
        replicas: Collection[Replica] = self.replicas.values()
        for hook in self._parts.starters:
            replicas = hook(replicas)
        return replicas

    @property
    def _may_start(self) -> bool:
        """Whether a prompt may start on some replica."""
        return any(replica.credits for replica in self._starters)

    def _replica_of(self, waiting: Waiting) -> Replica | None:
        if waiting.paused is None:
            return choose_replica(self._starters, waiting.chain)
        replica = self.replicas[waiting.paused.replica]
        return replica if replica.credits else None

    def _start(self, waiting: Waiting, replica: Replica, now_ns: int) -> Dispatched:
        priority_class, request = waiting.flow.priority_class, waiting.request
        rank, level = int(priority_class.key), priority_class.level(now_ns)
        number = min(replica.credits, len(waiting.specs))
        if waiting.paused is None:
            for hook in self._parts.limit:
                number = hook(request, replica, number)
        replica.credits -= number
        specs = self.queue.take(waiting, number, now_ns)
        if not waiting.specs:
            self._forget(waiting)
        if waiting.paused is not None:
            self.counts.resumes += 1
            self.run(replica, waiting.paused, level, rank)
            message: AdmittedRequest | ResumeSequences = ResumeSequences((specs[0].seq_id,), rank)
        else:
            started = [Running.of(waiting, spec) for spec in specs]
            for running in started:
                self.run(replica, running, level, rank)
            for hook in self._parts.dispatched:
                hook(waiting, replica, started)
            if waiting.untouched:
                # Charge the first sample the whole prompt in advance; its siblings share it.
                # Cached tokens are charged too: charging less would let a tenant have more
                # places than the bound allows before the guess proves wrong.
                waiting.untouched = False
                started[0].charged = len(request.prompt.token_ids)
                started[0].flow.charge(started[0].charged * self.config.prefill_weight)
            sections = [hook(replica, started) for hook in self._parts.section]
            held = StageTime(stage="fairness", start_ns=waiting.arrived_ns, end_ns=now_ns)
            info = msgspec.structs.replace(request.info, queued=held)
            message = msgspec.structs.replace(request, info=info, sequences=specs, rank=rank)
            if found := [section for section in sections if section is not None]:
                message = with_sections(message, *found)
        return Dispatched(
            replica=replica.name,
            message=message,
            request=request,
            arrived_ns=waiting.arrived_ns,
            deadline_ns=waiting.deadline_ns,
            resumed=waiting.paused,
            last=not waiting.specs,
            passed_by=self.queue.passed_by(waiting),
        )

    def _forget(self, waiting: Waiting) -> None:
        request_id = waiting.request.info.request_id
        self._of_request[request_id].remove(waiting)
        if not self._of_request[request_id]:
            del self._of_request[request_id]

    # --- charging -----------------------------------------------------------------------------

    def _correct_charge(self, running: Running, num_tokens: int, *, continues: bool) -> None:
        """Replace the charge by the tokens that a start computed. Recomputing isn't charged.

        `continues`: the sequence was charged where it began, and starts where it continues.
        """
        for hook in self._parts.continued if continues else ():
            hook(running)
        if continues or running.started:
            self.counts.recomputed_tokens += num_tokens - 1
            return
        running.started = True
        running.flow.charge((num_tokens - running.charged) * self.config.prefill_weight)

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
        self.queue.back(running.flow)
        return running

    def _end(self, replica: Replica, seq_id: int) -> None:
        for hook in self._parts.reported:
            hook(replica, seq_id)
        was_running = seq_id in replica.running
        running = replica.end(seq_id)
        if running is None:
            return
        for hook in self._parts.ended:
            hook(running)
        if was_running:
            self.queue.back(running.flow)
            return
        for waiting in self._of_request.get(running.request.info.request_id, []):
            if waiting.paused is running:
                self._forget(waiting)
                self.queue.drop(waiting)
                return

    # --- deadlines ----------------------------------------------------------------------------

    def _expire(self, info: RequestInfo, message: str) -> None:
        cancel = Cancel(info.request_id, info.entry_id, "expired", "expired", message)
        self._expired.append(self.cancel(cancel))
