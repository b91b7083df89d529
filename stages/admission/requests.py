"""The requests that a lane holds: how each comes in, goes into the lane, and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ...bus.channel import RequestEntry
from ...bus.control import Cancel
from ...bus.messages import RecoveredSample
from ...bus.public import ErrorInfo
from ...config import AdmissionConfig
from . import effects as do
from .checks import request_id_of
from .effects import Effect
from .events import Arrival, Judged
from .in_hand import InHand
from .ledger import Ledger, Unanswered, entry_deadline_ns
from .overload import FinishRate


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
