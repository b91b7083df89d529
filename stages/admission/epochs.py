"""Epochs of a lane: how admission recovers its requests when something fails.

A new epoch goes through these states: some stages are missing; streaming sends what it has of
each unanswered request; all are resumed, suspects one at a time; open, so that new requests are
admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec

from ...bus.control import (
    Cancel,
    CancelAll,
    Drain,
    ServerRestarted,
    StageReady,
    StageStarted,
    StageStopped,
)
from ...bus.entries import RequestEntry, entry_key
from ...bus.envelope import Message
from ...bus.messages import RequestFinished, RequestOpened
from ...bus.parts.accounts import RequestTimes
from ...bus.public import ErrorInfo
from ...bus.recovery import Fenced, Recovered, RecoveredSample, RecoveryItem, Retracted
from ...bus.sections import with_sections
from ...config import REPLICATED, Config, role_of, split_role
from . import effects as do
from .arrivals import Arrival, Judged, Step
from .checks import request_id_of
from .participants import Participants, differing_fields, fingerprints_of
from .refusals import why_dead
from .requests import Outbox, Requests, Unanswered

REMEMBERED_ELSEWHERE = 4096
"""Requests of other lanes that streaming drops in the next epoch; the oldest are forgotten."""

RECOVER_BATCH = 64
"""Requests whose state one message requests from streaming."""

Status = Literal["error", "cancelled", "expired"]

EXPIRED = "the request's time budget ran out while a stage was missing"
ELSEWHERE = "another lane has taken the request over"
ABORTED = "all requests in flight were ended from outside"
OVERDUE = "the pipeline is shutting down and the request was not done in time"


class EpochCore:
    """A state machine: events in, effects out.

    One event at a time: its effects are performed, in order, and their answers handled, before the
    next event. Only entries are taken from the queue between an effect and its answer
    (`Incoming.add`, `Incoming.set_apart`); `arrive` follows for each.

    Attributes:
        epoch: The current number, 0 before the first.
        requests: Requests that the lane holds.
        participants: The other stages.
        renewed_ns: When the lease was last renewed.
        asked: Entries, by key, requested from streaming in this epoch and not answered.
        alone: Suspects that wait to run alone, in order.
        is_open: Whether new requests are admitted.
        draining: Whether no request is admitted any more.
    """

    def __init__(self, config: Config, role: str, incarnation: str) -> None:
        """`role` and `incarnation`: admission's own."""
        self._outbox = Outbox()
        self._do = self._outbox.add  # perform effects
        self.epoch = 0
        self.requests = Requests(config.admission, self._outbox)
        self.participants = Participants(config.pipeline.replicas)
        self.renewed_ns = 0
        self.is_open = False
        self.draining = False
        self._ledger = self.requests.ledger
        self._role, self._incarnation = role, incarnation
        self._lease_ns = int(config.admission.lease_s * 1e9)
        self.asked: set[str] = set()
        self.alone: deque[str] = deque()
        # Of this epoch: streaming's answers, and entries requested from it after the others
        # were resumed.
        self._answers: dict[str, tuple[RecoveredSample, ...]] = {}
        self._late: set[str] = set()
        self._asked_all = False
        self._resumed = False
        self._elsewhere: deque[Cancel] = deque(maxlen=REMEMBERED_ELSEWHERE)
        self._overdue = False
        self._drain_until_ns = 0
        # When the lane stopped serving, also over several epochs; for spans.
        self._down_since_ns = 0
        self._epochs_begun = self._replayed = 0

    # --- state --------------------------------------------------------------------------------

    @property
    def num_recovering(self) -> int:
        """Requests that were not resumed in this epoch."""
        if self._resumed:
            return len(self.alone)
        return len(self._ledger) + len(self.requests.inherited)

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of new epochs and of resumed requests since the last call."""
        counts = self._epochs_begun, self._replayed
        self._epochs_begun = self._replayed = 0
        return counts

    def wake_at_ns(self) -> int | None:
        """Return when `tick` is due; None for never."""
        wake_at = [self._patience_ends_ns()]
        if not self._all_in_lane:
            wake_at.append(self.requests.next_deadline_ns())
        if self.draining and not self._overdue:
            wake_at.append(self._drain_until_ns)
        return min((at_ns for at_ns in wake_at if at_ns is not None), default=None)

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Message | Step, now_ns: int) -> list[do.Effect]:
        """Return the effects of an event: a message, or one of the methods below.

        A message that admission has no use for is logged. `now_ns`: on this process's clock.
        """
        if callable(event):
            event(now_ns)
        else:
            self._receive(event, now_ns)
        effects = list(self._outbox)
        self._outbox.clear()
        return effects

    def _receive(self, message: Message, now_ns: int) -> None:
        match message:
            case RequestFinished(request_id, entry_id):
                self._finish(entry_id, request_id, now_ns)
            case Recovered(key, samples):
                self._take_answer(key, samples)
            case Retracted(key, indices):
                self._begin_anew(key, indices, now_ns)
            case Cancel():
                self._cancel(message)
            case CancelAll():
                self._cancel_all()
            case Drain(timeout_ns):
                self._start_drain(now_ns + timeout_ns)
            case StageStarted(self._role, incarnation):
                if incarnation != self._incarnation:
                    self._do(do.Renew())  # a successor, or a late message of a predecessor
            case StageStarted(role):
                self._stage_started(role, now_ns)
            case StageStopped(role):
                if role != self._role:
                    self._stage_stopped(message, now_ns)
            case Fenced(keys):
                # The queue records which lane has them.
                self._do(do.Renew(), do.Then(partial(self._check_fences, keys)))
            case ServerRestarted():
                self._do(do.MarkPossiblyLost())
                self._begin("the server of the bus was restarted", now_ns)
            case _:
                name = type(message).__name__
                self._outbox.log("warning", "message_not_understood", type=name)

    def begin(self, pending: Iterable[RequestEntry], now_ns: int) -> None:
        """Begin with a predecessor's unanswered entries."""
        self.renewed_ns = now_ns
        self.requests.inherited = [(entry, now_ns) for entry in pending]
        self._begin("admission started", now_ns)

    def larger_epoch(self, now_ns: int) -> None:
        """Note that the stages are in a larger epoch: a successor's, or one that the server has
        lost."""
        reason = "the stages were in a larger epoch"
        self._do(do.Renew(), do.Then(partial(self._begin, reason)))

    def renewed(self, lost: Iterable[str], now_ns: int) -> None:
        """Note that the leases are renewed, and drop entries that other lanes have, by key."""
        self.renewed_ns = now_ns
        self._drop_lost(lost)

    def give_up(self, key: str, error: ErrorInfo, now_ns: int) -> None:
        """End a request of which a message can't be sent."""
        if (item := self._ledger.get(key)) is not None:
            self.requests.give_up(item, error)

    # --- epochs -------------------------------------------------------------------------------

    def _begin(self, reason: str, now_ns: int) -> None:
        """Begin an epoch: all stages drop their state. When all are ready, requests are resumed."""
        if self._resumed or not self._down_since_ns:
            self._down_since_ns = now_ns
        self._set_gate(is_open=False)
        self._asked_all = self._resumed = False
        self.participants.begin(now_ns)
        self.asked.clear()
        self._late.clear()
        self._answers.clear()
        self.alone.clear()
        self._do(do.BeginEpoch(reason))

    def open_epoch(self, epoch: int, reason: str, now_ns: int) -> None:
        """Reset the stages, for a new epoch with this number."""
        self.epoch = epoch
        self._epochs_begun += 1
        self._outbox.log("debug", "epoch_begins", epoch=epoch, reason=reason)
        for role in self.participants.roles:
            self._do(do.SendReset(role))

    def _check_fences(self, keys: Sequence[str], now_ns: int) -> None:
        """Begin a new epoch if streams of these entries are still this lane's."""
        if mine := sum(key in self._ledger for key in keys):
            self._begin(f"{mine} streams take nothing more in this epoch", now_ns)

    def _set_gate(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._do(do.SetGate(is_open))

    def take_part(self, ready: StageReady, epoch: int, now_ns: int) -> None:
        """Note that a stage takes part in an epoch."""
        if epoch != self.epoch:
            return
        waited = self.participants.hear(ready.stage)
        if ready.capacity is not None:
            capacity = self.participants.hold(ready.stage, ready.capacity)
            self._do(do.SetCapacity(capacity))
            if fields := differing_fields(fingerprints_of(capacity)):
                self._outbox.log("warning", "replicas_differ", fields=fields)
        if not waited:
            return
        self._recover(now_ns)
        if ready.stage == "streaming":
            self._ask_early(item for item in self._ledger if item.end is not None)

    def _recover(self, now_ns: int) -> None:
        """Recover the requests, once enough stages take part."""
        if self._asked_all or not self.participants.are_enough(now_ns):
            return
        if missing := self.participants.dismiss_missing():
            self._outbox.log("warning", "replicas_missing", missing=missing)
        # Nothing may be written of requests that another lane has taken over.
        self._do(do.Renew(), do.Then(self._ask_streaming))

    def _stage_started(self, role: str, now_ns: int) -> None:
        """A stage has started, and holds nothing."""
        self.participants.left.discard(role)
        if not self._is_apart(role):
            self._begin(f"{role} started", now_ns)
            return
        self._outbox.log("info", "replica_joins", started=role)
        for stage in REPLICATED:
            self._do(do.SendReset(role_of(stage, split_role(role)[1])))

    def _stage_stopped(self, stopped: StageStopped, now_ns: int) -> None:
        """A stage has stopped, and what it held is lost."""
        role = stopped.stage
        self._outbox.log("warning", "stage_lost", lost=role, reason=stopped.reason)
        self.participants.left.add(role)
        if self._is_apart(role):
            return
        if stopped.failed:
            self._ledger.suspect(self.alone)
        self._begin(f"{role} stopped", now_ns)

    def _is_apart(self, role: str) -> bool:
        """Return whether a stage belongs to a replica without a part in this epoch."""
        return self._asked_all and self.participants.is_apart(role)

    # --- recovery -----------------------------------------------------------------------------

    def _ask_streaming(self, now_ns: int) -> None:
        while self._elsewhere:
            self._do(do.Forget(self._elsewhere.popleft()))
        if inherited := self.requests.inherited:
            self._do(do.Claim(tuple(entry for entry, _ in inherited)))
        self._do(do.Then(self._ask_all))

    def admit_inherited(
        self,
        entries: Sequence[RequestEntry],
        owners: Sequence[str | None],
        long: Sequence[bool],
        now_ns: int,
    ) -> None:
        """Admit inherited entries whose request ids were claimed.

        Args:
            entries: The entries.
            owners: For each entry, the entry with its request id: itself if the request may have
                begun, None if the id was free.
            long: For each entry, whether its prompt takes long to tokenise.
            now_ns: The time.
        """
        inherited = self.requests.pop_inherited(entries)
        incoming = self.requests.incoming
        claims = zip(inherited, owners, long, strict=True)
        for (entry, received_ns), owner, is_long in claims:
            if entry.key in self._ledger or entry.key in incoming:
                continue
            incoming.add([entry])
            if is_long:
                # It may have begun, but not in this epoch: it was inherited before.
                incoming.set_apart(entry.key)
                self._do(do.Tokenize(Arrival(entry, received_ns, owner, "late")))
            else:
                arrival = Arrival(entry, received_ns, owner, "inherited")
                self._do(do.Then(partial(self._admit_arrival, arrival)))

    def _ask_all(self, now_ns: int) -> None:
        self._ask(self._ledger)
        self._asked_all = True
        self._resume_when_answered()

    def _ask_early(self, items: Iterable[Unanswered]) -> None:
        """Ask about requests that are to end: of the missing stages they need streaming alone."""
        if (missing := self.participants.missing) and "streaming" not in missing:
            self._ask(items)

    def _ask(self, items: Iterable[Unanswered]) -> None:
        items = list(items)
        for start in range(0, len(items), RECOVER_BATCH):
            some = items[start : start + RECOVER_BATCH]
            self.asked.update(item.key for item in some)
            asked = tuple(
                RecoveryItem(item.result_key, item.entry_id, item.request_id) for item in some
            )
            opened = tuple(
                _opened_again(item.accepted.opened, self._down_since_ns)
                for item in some
                if item.accepted is not None
            )
            self._do(do.Ask(asked, opened, self.participants.first_executor()))

    def _take_answer(self, key: str, samples: tuple[RecoveredSample, ...]) -> None:
        self.asked.discard(key)
        item = self._ledger.get(key)
        if item is not None:
            self._answers[key] = samples
            if self.participants.missing and item.end is not None:
                self.requests.end(item, item.end)
            elif key in self._late:
                self._late.discard(key)
                self._continue(item)
                self._run_next_suspect()
        self._resume_when_answered()

    def _resume_when_answered(self) -> None:
        """Resume all requests once all stages are ready and streaming has answered."""
        if not self._asked_all or self.asked or self._resumed:
            return
        self._resumed = True
        if len(self._ledger):
            self._outbox.log("info", "resuming", requests=len(self._ledger), epoch=self.epoch)
        for item in self._ledger:
            self._continue(item)
        self._do(do.TakePart())
        self._run_next_suspect()

    def _continue(self, item: Unanswered) -> None:
        if item.end is not None:
            self.requests.end(item, item.end)
            return
        match self._ledger.judge(item, self._answers.get(item.key, ())):
            case "go":
                self._resume(item)
            case "alone":
                self._set_gate(is_open=False)
                self.alone.append(item.key)
            case "dead":
                self.requests.give_up(item, why_dead(item.deaths))

    def _resume(self, item: Unanswered) -> None:
        self._replayed += 1
        self.requests.forward(item, self._answers.get(item.key, ()), self._down_since_ns)

    def _begin_anew(self, key: str, indices: Sequence[int], now_ns: int) -> None:
        """Send samples into the lane again, whose tokens streaming has dropped."""
        item = self._ledger.get(key)
        if item is not None and item.accepted is not None and item.end is None and self._resumed:
            number = item.accepted.opened.n
            others = (RecoveredSample(each, (), each not in indices) for each in range(number))
            self.requests.forward(item, tuple(others), now_ns)

    def _run_next_suspect(self) -> None:
        """Run the next suspect once no request runs; open the lane when there is none left."""
        if not self._resumed or self.is_open:
            return
        in_lane = sum(item.end is None for item in self._ledger) - len(self.alone)
        while self.alone and not in_lane:
            item = self._ledger.get(self.alone.popleft())
            if item is not None and item.end is None:
                self._outbox.log("warning", "resuming_alone", item)
                self._resume(item)
                in_lane = 1
        if not self.alone:
            self._set_gate(is_open=True)
            self._outbox.log("info", "ready", brief="ready", epoch=self.epoch)

    # --- admission and ends -------------------------------------------------------------------

    def arrive(self, arrival: Arrival, now_ns: int) -> None:
        """Admit an entry while the lane is open."""
        if now_ns - self.renewed_ns > self._lease_ns:
            # This process was stopped for long: other lanes may have its requests.
            self._do(do.Renew(), do.Then(partial(self._admit_arrival, arrival)))
        else:
            self._admit_arrival(arrival, now_ns)

    def _admit_arrival(self, arrival: Arrival, now_ns: int) -> None:
        if not self.requests.incoming.remove(arrival.key):
            return  # another lane has it
        if arrival.key in self._ledger:
            return  # the queue may deliver an entry twice
        if arrival.way == "taken" and arrival.owner == arrival.entry.entry_id:
            self.inherit([arrival.entry], "took_a_request_that_was_begun_before", now_ns)
        else:
            self.requests.judge(arrival, draining=self.draining)

    def enter(self, judged: Judged, now_ns: int) -> None:
        """Enter an entry that was accepted or refused."""
        item, way = self.requests.enter(judged), judged.arrival.way
        if way == "taken":
            if item.end is None:
                self.requests.forward(item)
            else:
                self.requests.end(item, item.end)
        elif way == "late":
            self._late.add(item.key)
            self._ask([item])
        elif item.end is not None:
            self._ask_early([item])

    def _finish(self, entry_id: str, request_id: str, now_ns: int) -> None:
        self.requests.finish(entry_id, request_id, now_ns)
        self._forget(entry_key(entry_id, request_id))
        self._resume_when_answered()
        self._run_next_suspect()

    def _forget(self, key: str) -> None:
        """Drop recovery state of an entry that has left the ledger."""
        self._late.discard(key)
        self._answers.pop(key, None)
        self.asked.discard(key)
        if key in self.alone:
            self.alone.remove(key)

    def _cancel(self, cancel: Cancel) -> None:
        key = self.requests.key_of(cancel)
        item = self._ledger.get(key)
        if item is None:
            if key:
                self.requests.cancel_early(key, cancel)
        elif item.end is None:
            ids = {"request_id": item.request_id, "entry_id": item.entry_id}
            self._cut_short(item, msgspec.structs.replace(cancel, **ids))

    def _cancel_all(self) -> None:
        for entry in self.requests.incoming.apart:
            cancel = Cancel(request_id_of(entry), entry.entry_id, "cancelled", "aborted", ABORTED)
            self.requests.cancel_early(entry.key, cancel)
        self._cut_all_short(self._ledger, "cancelled", "aborted", ABORTED)

    def _cut_all_short(
        self, items: Iterable[Unanswered], status: Status, code: str, message: str
    ) -> None:
        for item in items:
            if item.end is None:
                self._cut_short(item, Cancel(item.request_id, item.entry_id, status, code, message))

    def _cut_short(self, item: Unanswered, cancel: Cancel) -> None:
        """End a request wherever it is; with the lane down, once streaming takes part."""
        item.end = cancel
        if item.accepted is not None:
            self._do(do.TraceCancel(item.trace, cancel))
        if item.key in self.alone:
            self.alone.remove(item.key)
            self.requests.end(item, cancel)
            self._run_next_suspect()
        elif self._resumed:
            self._do(do.CutShort(cancel))
        else:
            self._ask_early([item])

    # --- deadlines and draining ---------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Check deadlines."""
        if not self._all_in_lane:
            if inherited := self.requests.overdue_inherited(now_ns):
                self._do(do.Claim(inherited, overdue=True))
            self._cut_all_short(self.requests.overdue(now_ns), "expired", "expired", EXPIRED)
        if self._patience_ends_ns() is not None:
            self._recover(now_ns)
        if self.draining:
            self._do(do.Then(self._check_drain))

    @property
    def _all_in_lane(self) -> bool:
        """Whether all requests are in the lane, whose stages check their deadlines."""
        return self._resumed and not self.alone

    def _patience_ends_ns(self) -> int | None:
        """Return when the epoch goes on without the missing replicas; None for never."""
        return None if self._asked_all else self.participants.patience_ends_ns()

    def _start_drain(self, until_ns: int) -> None:
        if not self.draining:
            self.draining = True
            self._drain_until_ns = until_ns
            self._do(do.StopTaking(), do.StopWaiting())
            self._outbox.log("info", "draining", brief="stopping", in_flight=len(self._ledger))
        self._drain_until_ns = min(self._drain_until_ns, until_ns)

    def _check_drain(self, now_ns: int) -> None:
        """Finish draining once every entry is answered; overdue requests end with an error."""
        if not self._overdue and now_ns >= self._drain_until_ns:
            self._overdue = True
            self._cut_all_short(self._ledger, "error", "shutting_down", OVERDUE)
        if not len(self._ledger) and (self._overdue or not self.requests.incoming.apart):
            self._do(do.Drained())

    # --- other lanes --------------------------------------------------------------------------

    def _drop_lost(self, keys: Iterable[str]) -> None:
        """Drop entries that another lane has taken over; no more of them may be written here."""
        number = 0
        for key in keys:
            was_held, item = self.requests.lose(key)
            number += was_held
            self._forget(key)
            if item is not None:
                ids = item.request_id, item.entry_id
                gone = Cancel(*ids, "cancelled", "cancelled", ELSEWHERE)
                self._elsewhere.append(msgspec.structs.replace(gone, elsewhere=True))
                if self._resumed:
                    self._do(do.CutShort(self._elsewhere[-1]))
        if number:
            self._outbox.log("warning", "requests_gone_to_another_lane", requests=number)
            self._resume_when_answered()
            self._run_next_suspect()

    def inherit(self, entries: Sequence[RequestEntry], reason: str, now_ns: int) -> None:
        """Take over requests that another lane or a predecessor may have begun."""
        self.requests.inherited += [(entry, now_ns) for entry in entries]
        self._outbox.log("info", reason, requests=len(entries))
        self._begin(reason, now_ns)


def _opened_again(opened: RequestOpened, down_since_ns: int) -> RequestOpened:
    times = RequestTimes.find(opened.parts) or RequestTimes()
    return with_sections(opened, msgspec.structs.replace(times, down_since_ns=down_since_ns))
