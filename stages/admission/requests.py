"""Requests that a lane holds: entries on their way in, the ledger of unanswered ones, and how each
request enters the lane and ends. The ledger is all that a failure of the lane leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from ...bus.channel import RequestEntry
from ...bus.control import Cancel
from ...bus.messages import RecoveredSample
from ...bus.public import ErrorInfo
from ...config import MAX_INT64, AdmissionConfig
from . import effects as do
from .checks import request_id_of
from .effects import Effect
from .events import Accepted, Arrival, Judged
from .refusals import FinishRate

REMEMBERED_CANCELS = 4096
"""Cancellations of entries not seen yet that are kept."""


class InHand:
    """Entries on their way into the ledger; those whose prompts take long are set apart.

    It also keeps cancellations of entries that are not in the ledger. Such an entry may be in hand,
    on its way here, or answered already; nobody can tell.
    """

    def __init__(self) -> None:
        self._entries: dict[str, RequestEntry] = {}
        self._apart: set[str] = set()
        # The oldest first.
        self._cancelled: OrderedDict[str, Cancel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    @property
    def apart(self) -> tuple[RequestEntry, ...]:
        """Those whose prompts are being tokenised, or wait for that."""
        return tuple(entry for entry_id, entry in self._entries.items() if entry_id in self._apart)

    @property
    def num_cancelled(self) -> int:
        """Cancellations that are kept."""
        return len(self._cancelled)

    def add(self, entries: Iterable[RequestEntry]) -> None:
        """Entries were taken."""
        for entry in entries:
            self._entries[entry.entry_id] = entry

    def set_apart(self, entry_id: str) -> None:
        """An entry's prompt is tokenised while others go past it, if it is still in hand."""
        if entry_id in self._entries:
            self._apart.add(entry_id)

    def remove(self, entry_id: str) -> bool:
        """An entry goes into the ledger, or is another lane's; returns whether it was in hand."""
        self._apart.discard(entry_id)
        return self._entries.pop(entry_id, None) is not None

    def entry_of(self, request_id: str) -> str | None:
        """The entry in hand that has this request id, None for none."""
        for entry_id, entry in self._entries.items():
            if request_id_of(entry) == request_id:
                return entry_id
        return None

    def cancel(self, entry_id: str, cancel: Cancel) -> None:
        """An entry that is not in the ledger is to end as soon as it is let in."""
        self._cancelled[entry_id] = cancel
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def take_cancel(self, entry_id: str) -> Cancel | None:
        """How an entry that is let in now is to end; None if it was not cancelled."""
        return self._cancelled.pop(entry_id, None)


Verdict = Literal["go", "alone", "dead"]


class Unanswered(msgspec.Struct):
    """An entry of the requests queue whose terminal message is not known to be written.

    Attributes:
        entry: As it was taken.
        accepted: The valid request; None for an entry that was refused.
        deadline_ns: On this process's clock.
        end: How the request is to end, once that is decided here: refused, cancelled, too late.
        deaths: Failures of the lane that it may have caused, since it last made progress.
        progress: Tokens that streaming had of it at the last failure.
        suspected: It was in the lane when a stage failed, and streaming was not heard since.
    """

    entry: RequestEntry
    accepted: Accepted | None = None
    deadline_ns: int | None = None
    end: Cancel | None = None
    deaths: int = 0
    progress: int = 0
    suspected: bool = False

    @property
    def entry_id(self) -> str:
        return self.entry.entry_id

    @property
    def request_id(self) -> str:
        return request_id_of(self.entry)

    @property
    def trace(self) -> tuple[str, str]:
        """Traceparent and tracestate: where the other stages' spans of the request belong; of one
        that was refused, what it came with."""
        where = self.entry if self.accepted is None else self.accepted.opened
        return where.traceparent, where.tracestate

    @property
    def result_key(self) -> str:
        """The key of its result stream."""
        if self.accepted is not None:
            return self.request_id
        return self.end.result_key if self.end is not None else self.entry_id


class Ledger:
    """The unanswered entries in the order in which they were taken.

    A request may be the reason why its lane fails, so each counts the failures that hit it without
    progress in between. The last chance is given alone, so that no other is taken for the culprit.
    """

    def __init__(self, max_lane_deaths: int) -> None:
        self._max_lane_deaths = max_lane_deaths
        self._entries: dict[str, Unanswered] = {}
        # Request id to entry id, of those that were let in: a refused duplicate has the same
        # request id and another entry.
        self._let_in: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Unanswered]:
        return iter(list(self._entries.values()))

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    def add(self, item: Unanswered) -> None:
        """Enters an entry, or what was decided about it."""
        entry_id = item.entry.entry_id
        self._entries[entry_id] = item
        if item.accepted is not None:
            self._let_in[item.accepted.opened.request_id] = entry_id

    def get(self, entry_id: str) -> Unanswered | None:
        """An entry; None when it is answered or was never taken."""
        return self._entries.get(entry_id)

    def entry_of(self, request_id: str) -> str | None:
        """The entry of a request that was let in and is not answered, None for any other."""
        return self._let_in.get(request_id)

    def remove(self, entry_id: str) -> Unanswered | None:
        """The entry is answered, or another lane's. Returns it, None when it was not there."""
        item = self._entries.pop(entry_id, None)
        if item is not None and item.accepted is not None:
            del self._let_in[item.accepted.opened.request_id]
        return item

    def suspect(self, outside: Collection[str]) -> None:
        """A stage failed by itself: any request in the lane may be the reason.

        Args:
            outside: Entries that are not in the lane, since they wait to run alone.
        """
        for item in self._entries.values():
            if item.entry_id not in outside:
                item.suspected = item.accepted is not None and item.end is None

    def judge(self, item: Unanswered, samples: Sequence[RecoveredSample]) -> Verdict:
        """Whether a request goes on, with the others or alone, now that its tokens are known."""
        progress = sum(len(sample.token_ids) + sample.finished for sample in samples)
        if progress > item.progress:
            item.deaths = 0
        item.deaths += item.suspected
        item.progress, item.suspected = progress, False
        if item.deaths >= self._max_lane_deaths:
            return "dead"
        return "alone" if item.deaths and item.deaths == self._max_lane_deaths - 1 else "go"


def entry_deadline_ns(entry: RequestEntry, received_ns: int) -> int | None:
    """When an entry's time is over, on this process's clock; it was `received_ns` here."""
    budget_ns = entry.budget_ns
    if budget_ns is None:
        return None
    return int(received_ns - entry.waited_ns + max(0, min(budget_ns, MAX_INT64)))


class Outbox:
    """Effects of the event that is handled, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def add(self, *effects: Effect) -> None:
        """They are to be done, behind those that there are."""
        self._effects += effects

    def log(
        self,
        level: Literal["debug", "info", "warning"],
        event: str,
        item: Unanswered | None = None,
        **fields: object,
    ) -> None:
        """A line is to be written, about a request if one is given."""
        if item is None:
            self.add(do.Log(level, event, fields))
        else:
            self.add(do.Log(level, event, fields, item.request_id, item.trace))

    def empty(self) -> list[Effect]:
        """All that there are; from now on there are none."""
        effects, self._effects = self._effects, []
        return effects


class Requests:
    """Entries that were taken and are not answered.

    Attributes:
        ledger: Those that were let in, or are to end.
        in_hand: Those that are on their way there.
        inherited: Those that a predecessor or another lane has taken, each with the time at which
            it came. They are not looked at before the next epoch: that takes the lane's capacity.
        finish_rate: How fast requests finish.
    """

    def __init__(self, config: AdmissionConfig, outbox: Outbox) -> None:
        """`outbox`: Gets what is to be done."""
        self.ledger = Ledger(config.max_lane_deaths)
        self.in_hand = InHand()
        self.inherited: list[tuple[RequestEntry, int]] = []
        self.finish_rate = FinishRate()
        self._max_in_flight = config.max_in_flight
        self._outbox = outbox

    def room(self) -> int:
        """How many more entries may be taken: those that were refused count until it is told."""
        return self._max_in_flight - len(self.ledger) - len(self.inherited) - len(self.in_hand)

    def owner_of(self, request_id: str, claimed: str | None) -> str | None:
        """The entry that has a request id: the one in flight, or else the one that claimed it."""
        return self.ledger.entry_of(request_id) or claimed

    # --- on the way in ------------------------------------------------------------------------

    def judge(self, arrival: Arrival, *, draining: bool) -> None:
        """Has an entry let in, or refused; `enter` comes next."""
        owner = self.owner_of(request_id_of(arrival.entry), arrival.owner)
        cancelled = self.in_hand.take_cancel(arrival.entry_id)
        self._outbox.add(do.Judge(arrival, owner, cancelled, draining))

    def enter(self, judged: Judged) -> Unanswered:
        """Enters an entry in the ledger, either with its request or with what it ends with."""
        entry = judged.arrival.entry
        deadline_ns = entry_deadline_ns(entry, judged.arrival.received_ns)
        item = Unanswered(entry, judged.accepted, deadline_ns, judged.end)
        self.ledger.add(item)
        if judged.failure is not None:
            item.end = self._bury(item, judged.failure)
        return item

    def cancel_early(self, entry_id: str, cancel: Cancel) -> None:
        """An entry that is not in the ledger is to end as soon as it is let in."""
        self.in_hand.cancel(entry_id, cancel)
        self._outbox.add(do.Hurry(entry_id))

    def entry_of(self, cancel: Cancel) -> str:
        """The entry that is meant by a cancellation, "" if it is not known here."""
        if cancel.entry_id:
            return cancel.entry_id
        request_id = cancel.request_id
        return self.ledger.entry_of(request_id) or self.in_hand.entry_of(request_id) or ""

    # --- into the lane, and out of it ---------------------------------------------------------

    def hand_on(
        self,
        item: Unanswered,
        samples: tuple[RecoveredSample, ...] | None = None,
        down_since_ns: int = 0,
    ) -> None:
        """Sends a request into the lane; one that is resumed, behind what there is of it."""
        assert item.accepted is not None, "an entry that was not let in has an end"
        self._outbox.add(
            do.HandOn(item.entry_id, item.accepted, item.deadline_ns, samples, down_since_ns)
        )

    def end(self, item: Unanswered, cancel: Cancel) -> None:
        """Ends a request of which nothing is in the lane; streaming adds what it has of it."""
        item.end = msgspec.structs.replace(
            cancel, request_id=item.request_id, entry_id=item.entry_id, unstarted=True
        )
        self._outbox.add(do.End(item.end))

    def give_up(self, item: Unanswered, error: ErrorInfo) -> None:
        """Ends a request of which nothing is in the lane, and keeps its entry."""
        self.end(item, self._bury(item, error))

    def finish(self, entry_id: str, request_id: str, now_ns: int) -> None:
        """An entry's terminal message is written."""
        if self.ledger.remove(entry_id) is not None:
            self.finish_rate.finished(now_ns)
        self._outbox.add(do.Acknowledge(entry_id, request_id))

    def lose(self, entry_id: str) -> tuple[bool, Unanswered | None]:
        """An entry is another lane's; returns whether it was to come in or had, and its item."""
        self.inherited = [item for item in self.inherited if item[0].entry_id != entry_id]
        was_in_hand, item = self.in_hand.remove(entry_id), self.ledger.remove(entry_id)
        return was_in_hand or item is not None, item

    def _bury(self, item: Unanswered, error: ErrorInfo) -> Cancel:
        """Keeps an entry; returns what its request ends with."""
        self._outbox.add(do.Bury(item.entry, item.trace, error, item.deaths))
        return Cancel(item.request_id, item.entry_id, "error", error.code, error.message)

    # --- time ---------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """When the first request that is not to end anyway has no time left; None for never."""
        deadlines = [entry_deadline_ns(*each) for each in self.inherited]
        deadlines += [item.deadline_ns for item in self.ledger if item.end is None]
        return min((at_ns for at_ns in deadlines if at_ns is not None), default=None)

    def overdue(self, now_ns: int) -> list[Unanswered]:
        """Requests in the ledger that have no time left."""
        return [item for item in self.ledger if _is_over(item.deadline_ns, now_ns)]

    def overdue_inherited(self, now_ns: int) -> tuple[RequestEntry, ...]:
        """Inherited entries that have no time left."""
        over = (each for each in self.inherited if _is_over(entry_deadline_ns(*each), now_ns))
        return tuple(entry for entry, _ in over)

    def take_inherited(self, entries: Sequence[RequestEntry]) -> list[tuple[RequestEntry, int]]:
        """These of the inherited, with when they came; from now on they are inherited no more."""
        chosen = {entry.entry_id for entry in entries}
        taken = [each for each in self.inherited if each[0].entry_id in chosen]
        self.inherited = [each for each in self.inherited if each[0].entry_id not in chosen]
        return taken


def _is_over(deadline_ns: int | None, now_ns: int) -> bool:
    return deadline_ns is not None and deadline_ns <= now_ns
