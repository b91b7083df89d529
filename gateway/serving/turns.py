"""Waiting for places in the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from ..server.http import EngineError
from ..server.measures import Measures
from .places import PlaceQueue, Ticket

RETRY_S = 5.0
"""`Retry-After` when too many requests wait."""


class WaitingCall(Ticket):
    """A call's waiting requests, in order."""

    def __init__(self, tenant: str, request_ids: Sequence[str], measures: Measures) -> None:
        super().__init__(tenant, len(request_ids))
        self.waiting = dict.fromkeys(request_ids)
        self.ended: set[str] = set()
        self.changed = anyio.Event()
        self._measures = measures

    async def take(self, request_id: str) -> bool:
        """Wait for a place, which the caller gives back.

        Returns:
            False, without a place, if the request was ended while it waited.

        Raises:
            EngineError: overloaded.
        """
        while request_id not in self.ended:
            if self.refused:
                self._measures.refused("too_many_waiting")
                raise EngineError(
                    f"too many requests wait (gateway.max_waiting); try again in {RETRY_S:g} s",
                    code="overloaded",
                    retry_after_s=RETRY_S,
                )
            if self.granted:
                self.granted -= 1
                del self.waiting[request_id]
                return True
            self.changed = anyio.Event()
            await self.changed.wait()
        return False


class Turns:
    """The shell around `PlaceQueue`: wakes the calls whose turn it is."""

    def __init__(self, places: int, max_waiting: int, measures: Measures) -> None:
        self._places = PlaceQueue[WaitingCall](places, max_waiting)
        self._measures = measures
        # In order of arrival.
        self._calls: dict[WaitingCall, None] = {}

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return self._places.waiting

    @contextmanager
    def wait(self, tenant: str, request_ids: list[str]) -> Iterator[WaitingCall]:
        """Wait for a place for each request; on exit, places that were not taken are free again."""
        call = WaitingCall(tenant, request_ids, self._measures)
        if not request_ids:
            yield call
            return
        self._calls[call] = None
        self._wake(self._places.ask(call))
        try:
            yield call
        finally:
            del self._calls[call]
            self._wake(self._places.leave(call))

    def resize(self, places: int) -> None:
        """Change the number of places."""
        self._wake(self._places.resize(places))

    def give_back(self, tenant: str) -> None:
        """Free a place that was taken."""
        self._wake(self._places.give_back(tenant))

    def end(self, concerns: Callable[[str], bool]) -> None:
        """End the waiting requests whose id matches."""
        for call in list(self._calls):
            if call.refused:
                continue
            for request_id in filter(concerns, list(call.waiting)):
                del call.waiting[request_id]
                call.ended.add(request_id)
                self._wake([*self._places.want_less(call), call])

    def _wake(self, calls: Iterable[WaitingCall]) -> None:
        for call in calls:
            call.changed.set()
