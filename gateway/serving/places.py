"""Places in the pipeline, shared fairly by tenants with more requests than it takes.

The rule is the dynamic threshold of Choudhury and Hahne ("Dynamic queue length thresholds for
shared-memory packet switches", 1998) with alpha 1: a tenant gets another place while it has fewer
than are free. So one tenant alone has half of the places, two have a third each, and a newcomer
always finds some free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(eq=False)
class Ticket:
    """A call that waits for places.

    Attributes:
        tenant: The call's tenant.
        wanted: Places that it waits for.
        granted: Places that it was given and has not taken yet.
        refused: Too many calls waited; it gets no more places.
    """

    tenant: str
    wanted: int
    granted: int = 0
    refused: bool = False


T = TypeVar("T", bound=Ticket)


class PlaceQueue(Generic[T]):
    """A number of places, and the tickets that wait for them, in order of arrival by tenant.

    Tenants take turns. Methods return the tickets that were given a place or refused, with
    repetitions.

    Attributes:
        free: Free places; below 0 while more are held than there are.
        waiting: Places that tickets wait for.
        held: Places by tenant, with those granted and not taken yet.
    """

    def __init__(self, number: int, max_waiting: int) -> None:
        """`max_waiting`: the most places that all tickets together may wait for."""
        self._number = number
        self._max_waiting = max_waiting
        self.held: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self.free = number
        self.waiting = 0
        # The tenant with the next turn is first.
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def resize(self, number: int) -> list[T]:
        """Change the number of places."""
        self.free += number - self._number
        self._number = number
        return self._grant()

    def ask(self, ticket: T) -> list[T]:
        """Queue a ticket."""
        self._queues.setdefault(ticket.tenant, deque()).append(ticket)
        self._wanted[ticket.tenant] += ticket.wanted
        self.waiting += ticket.wanted
        return self._grant() + self._shed()

    def give_back(self, tenant: str, number: int = 1) -> list[T]:
        """Free places of a tenant."""
        _subtract(self.held, tenant, number)
        self.free += number
        return self._grant()

    def want_less(self, ticket: T) -> list[T]:
        """Wait for one place less, or give back a granted one."""
        if ticket.wanted:
            self._drop(ticket, 1)
            return []
        ticket.granted -= 1
        return self.give_back(ticket.tenant)

    def leave(self, ticket: T) -> list[T]:
        """Stop waiting, and give back the granted places."""
        self._drop(ticket, ticket.wanted)
        unused, ticket.granted = ticket.granted, 0
        return self.give_back(ticket.tenant, unused)

    def _grant(self) -> list[T]:
        given: list[T] = []
        while (tenant := self._next()) is not None:
            self._queues.move_to_end(tenant)
            ticket = self._queues[tenant][0]
            ticket.granted += 1
            self.held[tenant] += 1
            self.free -= 1
            self._drop(ticket, 1)
            given.append(ticket)
        return given

    def _next(self) -> str | None:
        if self.free <= 0:
            return None
        return next((tenant for tenant in self._queues if self.held[tenant] < self.free), None)

    def _shed(self) -> list[T]:
        refused: list[T] = []
        while self.waiting > self._max_waiting:
            ((tenant, _),) = self._wanted.most_common(1)
            ticket = self._queues[tenant][-1]
            ticket.refused = True
            self._drop(ticket, ticket.wanted)
            refused.append(ticket)
        return refused

    def _drop(self, ticket: T, number: int) -> None:
        """Reduce the places that a ticket waits for; dequeue it at 0."""
        if not ticket.wanted:
            return
        ticket.wanted -= number
        self.waiting -= number
        _subtract(self._wanted, ticket.tenant, number)
        if not ticket.wanted:
            self._queues[ticket.tenant].remove(ticket)
            if not self._queues[ticket.tenant]:
                del self._queues[ticket.tenant]


def _subtract(counter: Counter[str], tenant: str, number: int) -> None:
    counter[tenant] -= number
    if not counter[tenant]:
        del counter[tenant]
