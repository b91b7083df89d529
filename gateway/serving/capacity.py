"""Capacity, such as that of the pipeline, shared fairly by tenants with more requests than it has.

The rule is the dynamic threshold of Choudhury and Hahne ("Dynamic queue length thresholds for
shared-memory packet switches", 1998) with alpha 1: a tenant gets another slot while it has fewer
than are free. So one tenant alone has half of the slots, two have a third each, and a newcomer
always finds some free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from ..server.fair_queue import FairQueue
from ..server.http import EngineError
from ..server.measures import Measures

RETRY_S = 5.0
"""`Retry-After` when too many requests wait."""


@dataclass(eq=False)
class Ticket:
    """A call's requests that wait for slots, in order.

    Attributes:
        tenant: The call's tenant.
        waiting: Ids of the requests without a slot.
        ended: Ids of requests that were ended while they waited.
        wanted: Slots that it waits for.
        granted: Slots that it was given and has not taken yet.
        refused: Too many requests waited; it gets no more slots.
        changed: Set when any of that changes.
    """

    tenant: str
    waiting: dict[str, None]
    ended: set[str] = field(default_factory=set)
    granted: int = 0
    refused: bool = False
    changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.wanted = len(self.waiting)


class Capacity:
    """A number of slots, and the tickets that wait for them.

    Attributes:
        free: Free slots; below 0 while more are held than there are.
        waiting: Slots that tickets wait for.
        held: Slots by tenant, with those granted and not taken yet.
    """

    def __init__(self, slots: int, max_waiting: int, measures: Measures) -> None:
        """`max_waiting`: the most slots that all tickets together may wait for."""
        self._slots, self._max_waiting, self._measures = slots, max_waiting, measures
        self.free, self.waiting = slots, 0
        self.held: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._queue = FairQueue[str, Ticket]()
        # In order of arrival.
        self._tickets: dict[Ticket, None] = {}

    @contextmanager
    def wait(self, tenant: str, request_ids: Sequence[str]) -> Iterator[Ticket]:
        """Wait for a slot for each request; on exit, slots that were not taken are free again."""
        ticket = self.ask(Ticket(tenant, dict.fromkeys(request_ids)))
        try:
            yield ticket
        finally:
            self.leave(ticket)

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for one slot, and hold it. Raises EngineError: overloaded."""
        with self.wait(tenant, [""]) as ticket:
            await self.take(ticket, "")
            try:
                yield
            finally:
                self.give_back(tenant)

    def ask(self, ticket: Ticket) -> Ticket:
        """Queue a ticket, and return it."""
        if ticket.wanted:
            self._tickets[ticket] = None
            self._queue.put(ticket.tenant, ticket)
            self._wanted[ticket.tenant] += ticket.wanted
            self.waiting += ticket.wanted
            self._grant()
            self._shed()
        return ticket

    async def take(self, ticket: Ticket, request_id: str) -> bool:
        """Wait for a slot, which the caller gives back.

        Returns:
            False, without a slot, if the request was ended while it waited.

        Raises:
            EngineError: overloaded.
        """
        while request_id not in ticket.ended:
            if ticket.refused:
                self._measures.refused("too_many_waiting")
                raise EngineError(
                    f"too many requests wait (gateway.max_waiting); try again in {RETRY_S:g} s",
                    code="overloaded",
                    retry_after_s=RETRY_S,
                )
            if ticket.granted:
                ticket.granted -= 1
                del ticket.waiting[request_id]
                return True
            ticket.changed = anyio.Event()
            await ticket.changed.wait()
        return False

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting, and give back the granted slots."""
        self._tickets.pop(ticket, None)
        self._drop(ticket, ticket.wanted)
        unused, ticket.granted = ticket.granted, 0
        self.give_back(ticket.tenant, unused)

    def give_back(self, tenant: str, number: int = 1) -> None:
        """Free slots of a tenant that were taken."""
        _subtract(self.held, tenant, number)
        self.free += number
        self._grant()

    def resize(self, slots: int) -> None:
        """Change the number of slots."""
        self.free += slots - self._slots
        self._slots = slots
        self._grant()

    def end(self, concerns: Callable[[str], bool]) -> None:
        """End the waiting requests whose id matches."""
        for ticket in list(self._tickets):
            for request_id in [] if ticket.refused else [*filter(concerns, ticket.waiting)]:
                del ticket.waiting[request_id]
                ticket.ended.add(request_id)
                if ticket.wanted:
                    self._drop(ticket, 1)
                else:
                    ticket.granted -= 1
                    self.give_back(ticket.tenant)
                ticket.changed.set()

    def _grant(self) -> None:
        while self.free > 0:
            ticket = self._queue.next(lambda tenant: self.held[tenant] < self.free)
            if ticket is None:
                return
            ticket.granted += 1
            self.held[ticket.tenant] += 1
            self.free -= 1
            self._drop(ticket, 1)
            ticket.changed.set()

    def _shed(self) -> None:
        """Refuse the newest ticket of the tenant that waits for most, while too many wait."""
        while self.waiting > self._max_waiting:
            ((tenant, _),) = self._wanted.most_common(1)
            ticket = self._queue.last(tenant)
            ticket.refused = True
            self._drop(ticket, ticket.wanted)
            ticket.changed.set()

    def _drop(self, ticket: Ticket, number: int) -> None:
        """Reduce the slots that a ticket waits for; dequeue it at 0."""
        if not ticket.wanted:
            return
        ticket.wanted -= number
        self.waiting -= number
        _subtract(self._wanted, ticket.tenant, number)
        if not ticket.wanted:
            self._queue.remove(ticket.tenant, ticket)


def _subtract(counter: Counter[str], tenant: str, number: int) -> None:
    counter[tenant] -= number
    if not counter[tenant]:
        del counter[tenant]
