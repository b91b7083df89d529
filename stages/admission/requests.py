"""Requests that a lane holds: incoming entries, the ledger of unanswered ones, and how each request
enters the lane and ends. The ledger is all that a failure of the lane leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from ...bus.control import Cancel
from ...bus.entries import RequestEntry, entry_key
from ...bus.public import ErrorInfo
from ...bus.recovery import RecoveredSample
from ...config import MAX_INT64, AdmissionConfig
from . import effects as do
from .arrivals import Accepted, Arrival, Judged
from .checks import request_id_of
from .refusals import FinishRate

REMEMBERED_CANCELS = 4096
"""Cancellations of unknown entries that are kept."""


class Incoming:
    """Entries that were taken and are not in the ledger yet; long prompts are tokenised apart.

    It also keeps cancellations of entries that are not in the ledger: such an entry may be
    incoming, not be taken yet, or be answered already. Entries are known by their keys.
    """

    def __init__(self) -> None:
        self._entries: dict[str, RequestEntry] = {}
        self._apart: set[str] = set()
        # The oldest first.
        self._cancelled: OrderedDict[str, Cancel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def apart(self) -> tuple[RequestEntry, ...]:
        """Entries whose prompts are tokenised apart, or wait for that."""
        return tuple(entry for key, entry in self._entries.items() if key in self._apart)

    def add(self, entries: Iterable[RequestEntry]) -> None:
        """Add entries that were taken."""
        self._entries.update((entry.key, entry) for entry in entries)

    def set_apart(self, key: str) -> None:
        """Note that an entry's prompt is tokenised apart, if it is still incoming."""
        if key in self._entries:
            self._apart.add(key)

    def remove(self, key: str) -> bool:
        """Remove an entry; return whether it was there."""
        self._apart.discard(key)
        return self._entries.pop(key, None) is not None

    def key_of(self, request_id: str) -> str | None:
        """Return the key of the entry with a request id; None for none."""
        entries = self._entries.items()
        return next((key for key, entry in entries if request_id_of(entry) == request_id), None)

    def before(self, key: str, request_id: str) -> str | None:
        """Return the entry id of a request that was taken before an entry; None for none."""
        for each, entry in self._entries.items():
            if each == key:
                break
            if request_id_of(entry) == request_id:
                return entry.entry_id
        return None

    def cancel(self, key: str, cancel: Cancel) -> None:
        """Keep a cancellation."""
        self._cancelled[key] = cancel
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def pop_cancel(self, key: str) -> Cancel | None:
        """Remove and return the cancellation of an entry; None for none."""
        return self._cancelled.pop(key, None)


class Unanswered(msgspec.Struct):
    """An entry of the requests queue whose terminal message is not known to be written.

    Attributes:
        entry: As it was taken.
        accepted: The valid request; None for an entry that was refused.
        deadline_ns: On this process's clock.
        end: The end of the request, once admission has decided it: refused, cancelled, expired.
        deaths: Failures of the lane that it may have caused, since it last made progress.
        progress: Tokens that streaming had of it at the last failure.
        suspected: It was in the lane when a stage failed, and streaming has not reported since.
        taken_ns: When it was taken.
    """

    entry: RequestEntry
    accepted: Accepted | None = None
    deadline_ns: int | None = None
    end: Cancel | None = None
    deaths: int = 0
    progress: int = 0
    suspected: bool = False
    taken_ns: int = 0

    @property
    def entry_id(self) -> str:
        return self.entry.entry_id

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def request_id(self) -> str:
        return request_id_of(self.entry)

    @property
    def trace(self) -> tuple[str, str]:
        """Traceparent and tracestate for spans; those of the entry if it was refused."""
        where = self.entry if self.accepted is None else self.accepted.opened
        return where.traceparent, where.tracestate

    @property
    def result_key(self) -> str:
        """Key of its result stream."""
        if self.accepted is not None:
            return self.request_id
        return self.end.result_key if self.end is not None else self.entry_id


class Ledger:
    """The unanswered entries, by key, in the order in which they were taken.

    A request may crash its lane, so each counts the failures that hit it without progress in
    between. Before a request is given up it runs once alone, so that no other takes the blame.
    """

    def __init__(self, max_lane_deaths: int) -> None:
        self._max_lane_deaths = max_lane_deaths
        self._entries: dict[str, Unanswered] = {}
        # By request id, of accepted requests: a refused duplicate has the same request id and
        # another entry.
        self._accepted: dict[str, Unanswered] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Unanswered]:
        return iter(list(self._entries.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, item: Unanswered) -> None:
        """Add an entry."""
        self._entries[item.key] = item
        if item.accepted is not None:
            self._accepted[item.accepted.opened.request_id] = item

    def get(self, key: str) -> Unanswered | None:
        """Return an entry; None if it is answered or was never taken."""
        return self._entries.get(key)

    def accepted(self, request_id: str) -> Unanswered | None:
        """Return an accepted request that is not answered; None for any other."""
        return self._accepted.get(request_id)

    def remove(self, key: str) -> Unanswered | None:
        """Remove and return an entry that is answered or another lane's; None if not there."""
        item = self._entries.pop(key, None)
        if item is not None and item.accepted is not None:
            del self._accepted[item.accepted.opened.request_id]
        return item

    def suspect(self, outside: Collection[str]) -> None:
        """Suspect every request in the lane, since a stage has failed by itself.

        Args:
            outside: Keys of entries that are not in the lane, since they wait to run alone.
        """
        for key, item in self._entries.items():
            if key not in outside:
                item.suspected = item.accepted is not None and item.end is None

    def judge(
        self, item: Unanswered, samples: Sequence[RecoveredSample]
    ) -> Literal["go", "alone", "dead"]:
        """Decide whether a request goes on, with others or alone, given its tokens so far."""
        progress = sum(len(sample.token_ids) + sample.finished for sample in samples)
        if progress > item.progress:
            item.deaths = 0
        item.deaths += item.suspected
        item.progress, item.suspected = progress, False
        if item.deaths >= self._max_lane_deaths:
            return "dead"
        return "alone" if item.deaths and item.deaths == self._max_lane_deaths - 1 else "go"


def entry_deadline_ns(entry: RequestEntry, received_ns: int) -> int | None:
    """Return an entry's deadline on this process's clock; None without one."""
    budget_ns = entry.budget_ns
    if budget_ns is None:
        return None
    return int(received_ns - entry.waited_ns + max(0, min(budget_ns, MAX_INT64)))


class Outbox(list[do.Effect]):
    """Effects of the current event, in order."""

    def add(self, *effects: do.Effect) -> None:
        """Append effects."""
        self += effects

    def log(
        self,
        level: Literal["debug", "info", "warning"],
        event: str,
        item: Unanswered | None = None,
        **fields: object,
    ) -> None:
        """Append a log line, about a request if one is given."""
        about = () if item is None else (item.request_id, item.trace)
        self.append(do.Log(level, event, fields, *about))


class Requests:
    """Entries that were taken and are not answered.

    Attributes:
        ledger: Accepted requests, and entries that are to end.
        incoming: Entries on their way to the ledger.
        inherited: Entries that a predecessor or another lane has taken, each with the time at which
            it came. They wait for the next epoch, since a check needs the lane's capacity.
        finish_rate: Rate at which requests finish.
    """

    def __init__(self, config: AdmissionConfig, outbox: Outbox) -> None:
        self.ledger = Ledger(config.max_lane_deaths)
        self.incoming = Incoming()
        self.inherited: list[tuple[RequestEntry, int]] = []
        self.finish_rate = FinishRate()
        self._max_in_flight = config.max_in_flight
        self._outbox = outbox

    def room(self) -> int:
        """Return how many more entries may be taken. Refused ones count until they are answered."""
        return self._max_in_flight - len(self.ledger) - len(self.inherited) - len(self.incoming)

    def owner_of(self, request_id: str, claimed: str | None) -> str | None:
        """Return the entry with a request id: in flight, or else the one that claimed it."""
        item = self.ledger.accepted(request_id)
        return item.entry_id if item is not None else claimed

    def key_of(self, cancel: Cancel) -> str:
        """Return the key of the entry that a cancellation names; "" if it is unknown."""
        if cancel.entry_id:
            return cancel.key
        item = self.ledger.accepted(cancel.request_id)
        return item.key if item is not None else self.incoming.key_of(cancel.request_id) or ""

    # --- admission ----------------------------------------------------------------------------

    def judge(self, arrival: Arrival, *, draining: bool) -> None:
        """Have an entry accepted or refused; `enter` comes next."""
        owner = self.owner_of(request_id_of(arrival.entry), arrival.owner)
        cancelled = self.incoming.pop_cancel(arrival.key)
        self._outbox.add(do.Judge(arrival, owner, cancelled, draining))

    def enter(self, judged: Judged) -> Unanswered:
        """Enter an entry in the ledger."""
        entry, taken_ns = judged.arrival.entry, judged.arrival.received_ns
        deadline_ns = entry_deadline_ns(entry, taken_ns)
        item = Unanswered(entry, judged.accepted, deadline_ns, judged.end, taken_ns=taken_ns)
        self.ledger.add(item)
        if judged.failure is not None:
            item.end = self._dead_letter(item, judged.failure)
        return item

    def cancel_early(self, key: str, cancel: Cancel) -> None:
        """End an entry that is not in the ledger as soon as it enters."""
        self.incoming.cancel(key, cancel)
        self._outbox.add(do.StopWaiting(key))

    # --- the lane -----------------------------------------------------------------------------

    def forward(
        self,
        item: Unanswered,
        samples: tuple[RecoveredSample, ...] | None = None,
        down_since_ns: int = 0,
    ) -> None:
        """Send a request into the lane; a resumed one goes on after its samples."""
        assert item.accepted is not None, "a refused entry has an end"
        self._outbox.add(
            do.Forward(item.key, item.accepted, item.deadline_ns, samples, down_since_ns)
        )

    def end(self, item: Unanswered, cancel: Cancel) -> None:
        """End a request that is not in the lane; streaming adds what it has of the request."""
        item.end = msgspec.structs.replace(
            cancel,
            request_id=item.request_id,
            entry_id=item.entry_id,
            unstarted=True,
            taken_ns=item.taken_ns,
            queued_ns=item.entry.queued_ns,
        )
        self._outbox.add(do.End(item.end))

    def give_up(self, item: Unanswered, error: ErrorInfo) -> None:
        """End a request that is not in the lane, and dead-letter its entry."""
        self.end(item, self._dead_letter(item, error))

    def finish(self, entry_id: str, request_id: str, now_ns: int) -> None:
        """Remove an entry whose terminal message is written."""
        if self.ledger.remove(entry_key(entry_id, request_id)) is not None:
            self.finish_rate.finished(now_ns)
        self._outbox.add(do.Acknowledge(entry_id, request_id))

    def lose(self, key: str) -> tuple[bool, Unanswered | None]:
        """Remove an entry that another lane has; return whether it was held, and its item."""
        self.inherited = [each for each in self.inherited if each[0].key != key]
        was_incoming, item = self.incoming.remove(key), self.ledger.remove(key)
        return was_incoming or item is not None, item

    def _dead_letter(self, item: Unanswered, error: ErrorInfo) -> Cancel:
        self._outbox.add(do.AddDeadLetter(item.entry, item.trace, error, item.deaths))
        return Cancel(item.request_id, item.entry_id, "error", error.code, error.message)

    # --- deadlines ----------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """Return the next deadline of a request without an end; None for none."""
        deadlines = [entry_deadline_ns(*each) for each in self.inherited]
        deadlines += [item.deadline_ns for item in self.ledger if item.end is None]
        return min((at_ns for at_ns in deadlines if at_ns is not None), default=None)

    def overdue(self, now_ns: int) -> list[Unanswered]:
        """Return the requests in the ledger whose deadline has passed."""
        return [item for item in self.ledger if _is_over(item.deadline_ns, now_ns)]

    def overdue_inherited(self, now_ns: int) -> tuple[RequestEntry, ...]:
        """Return the inherited entries whose deadline has passed."""
        over = (each for each in self.inherited if _is_over(entry_deadline_ns(*each), now_ns))
        return tuple(entry for entry, _ in over)

    def pop_inherited(self, entries: Sequence[RequestEntry]) -> list[tuple[RequestEntry, int]]:
        """Remove and return these inherited entries, with the times at which they came."""
        chosen = {entry.key for entry in entries}
        popped = [each for each in self.inherited if each[0].key in chosen]
        self.inherited = [each for each in self.inherited if each[0].key not in chosen]
        return popped


def _is_over(deadline_ns: int | None, now_ns: int) -> bool:
    return deadline_ns is not None and deadline_ns <= now_ns
