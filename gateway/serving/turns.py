"""Waiting for places in the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import anyio

from ..server.http import EngineError
from .measures import Measures
from .places import Places, Ticket

RETRY_S = 5.0
"""When to come again after too many have waited."""


class WaitingCall:
    """A call's requests that wait, in order."""

    def __init__(self, ticket: Ticket, request_ids: Iterable[str], measures: Measures) -> None:
        self.ticket = ticket
        self._measures = measures
        self.waiting = dict.fromkeys(request_ids)
        self.ended: set[str] = set()
        self.changed = anyio.Event()

    async def take(self, request_id: str) -> bool:
        """Waits for a place, which is then the caller's to give back.

        Returns:
            False when the request was ended while it waited; it has no place.

        Raises:
            EngineError: overloaded.
        """
        while request_id not in self.ended:
            if self.ticket.refused:
                self._measures.refused("too_many_waiting")
                raise EngineError(
                    f"too many requests wait (gateway.max_waiting); try again in {RETRY_S:g} s",
                    code="overloaded",
                    retry_after_s=RETRY_S,
                )
            if self.ticket.granted:
                self.ticket.granted -= 1
                del self.waiting[request_id]
                return True
            self.changed = anyio.Event()
            await self.changed.wait()
        return False


class Turns:
    """The shell around `Places`: wakes those who wait when it is their turn."""

    def __init__(self, places: int, max_waiting: int, measures: Measures) -> None:
        self._places = Places(places, max_waiting)
        self._measures = measures
        self._calls: dict[Ticket, WaitingCall] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._places.waiting

    @contextmanager
    def wait(self, tenant: str, request_ids: list[str]) -> Iterator[WaitingCall]:
        """Waits for a place for each of these; those not taken by the end are given back."""
        call = WaitingCall(Ticket(tenant, len(request_ids)), request_ids, self._measures)
        if not request_ids:
            yield call
            return
        self._calls[call.ticket] = call
        self._wake(self._places.ask(call.ticket))
        try:
            yield call
        finally:
            del self._calls[call.ticket]
            self._wake(self._places.leave(call.ticket))

    def resize(self, places: int) -> None:
        """There are so many places from now on."""
        self._wake(self._places.resize(places))

    def give_back(self, tenant: str) -> None:
        """A place that was taken is free again."""
        self._wake(self._places.give_back(tenant))

    def end(self, concerns: Callable[[str], bool]) -> None:
        """Ends the requests that wait and have such an id."""
        for call in list(self._calls.values()):
            if call.ticket.refused:
                continue
            for request_id in filter(concerns, list(call.waiting)):
                del call.waiting[request_id]
                call.ended.add(request_id)
                self._wake([*self._places.want_less(call.ticket), call.ticket])

    def _wake(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if ticket in self._calls:
                self._calls[ticket].changed.set()
