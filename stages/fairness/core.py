"""Who may run next: a priority queue in which waiting counts."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count

import msgspec

from ...bus.messages import (
    AdmittedRequest,
    Cancel,
    Dispatch,
    SequenceSpec,
    StageTime,
)
from ...config import FairnessConfig

LEFTOVERS_KEPT = 256
"""Entries of dispatched and cancelled requests that may be left in a heap, besides the others."""


class Queued(msgspec.Struct):
    """A request in the queue, and those of its sequences that are not dispatched yet."""

    request: AdmittedRequest
    waiting: deque[SequenceSpec]
    arrived_ns: int
    deadline_ns: int | None

    @property
    def key(self) -> tuple[str, str]:
        """Ids alone may repeat; with the entry's id they do not."""
        return self.request.info.request_id, self.request.info.entry_id


class Dispatched(msgspec.Struct, frozen=True):
    """What `pop` gives: the dispatch, and for telemetry and budget when its request came.

    `last` tells that no sequence of the request is left in the queue.
    """

    dispatch: Dispatch
    arrived_ns: int
    deadline_ns: int | None
    last: bool


class FairnessCore:
    """Owns the queue and the credits.

    A request's effective priority is its own plus one for each `aging_s` that it has waited. All
    requests age at the same rate, so their order never changes while they wait: the one with the
    largest `priority * aging_s - arrival` is first. A heap with that fixed key is exact.
    """

    def __init__(self, config: FairnessConfig) -> None:
        self._config = config
        self._heap: list[tuple[int, int, Queued]] = []
        self._queued: dict[str, Queued] = {}
        self._deadlines: list[tuple[int, int, Queued]] = []
        self._order = count()
        self.credits = 0

    def push(self, request: AdmittedRequest, now_ns: int, deadline_ns: int | None = None) -> None:
        """Puts a request in the queue. Times are on the caller's clock."""
        queued = Queued(request, deque(request.sequences), now_ns, deadline_ns)
        self._queued[request.info.request_id] = queued
        self._enqueue(queued)
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, next(self._order), queued))
        self._tidy()

    def pop(self, now_ns: int) -> Dispatched | None:
        """The next dispatch, or None when the queue is empty or no credit is left.

        A request with more sequences than there are credits is dispatched in parts.
        """
        while self.credits > 0 and self._heap:
            queued = self._heap[0][2]
            if not queued.waiting:
                heapq.heappop(self._heap)
                continue
            number = min(self.credits, len(queued.waiting))
            self.credits -= number
            chosen = tuple(queued.waiting.popleft() for _ in range(number))
            if not queued.waiting:
                heapq.heappop(self._heap)
                del self._queued[queued.request.info.request_id]
            return Dispatched(
                self._dispatch(queued, chosen, now_ns),
                queued.arrived_ns,
                queued.deadline_ns,
                last=not queued.waiting,
            )
        return None

    def cancel(self, cancel: Cancel) -> Cancel:
        """Drops what waits of a request; returns the cancellation to be passed on."""
        queued = self._queued.pop(cancel.request_id, None)
        if queued is None:
            return cancel
        untouched = len(queued.waiting) == len(queued.request.sequences)
        # The heap's entry is skipped when it comes up.
        queued.waiting.clear()
        return msgspec.structs.replace(cancel, unstarted=untouched)

    def expire(self, now_ns: int) -> list[Cancel]:
        """Drops the requests whose time is over; returns the cancellations to be passed on."""
        expired: list[Cancel] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            queued = heapq.heappop(self._deadlines)[2]
            if queued.waiting:
                request_id, entry_id = queued.key
                message = "the request's time budget ran out while it waited to run"
                expired.append(
                    self.cancel(Cancel(request_id, entry_id, "expired", "expired", message))
                )
        return expired

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do; None when no request in the queue has a deadline."""
        while self._deadlines and not self._deadlines[0][2].waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def update(self, config: FairnessConfig) -> None:
        """Takes new settings, for those in the queue too."""
        self._config = config
        waiting = [queued for _, _, queued in self._heap if queued.waiting]
        waiting.sort(key=lambda queued: queued.arrived_ns)
        self._heap.clear()
        for queued in waiting:
            self._enqueue(queued)

    @property
    def num_queued(self) -> int:
        """Requests with sequences that wait."""
        return len(self._queued)

    def _tidy(self) -> None:
        """Drops what is left of requests that are in the queue no longer, once that is most."""
        most = 2 * len(self._queued) + LEFTOVERS_KEPT
        if len(self._deadlines) > most:
            self._deadlines = [each for each in self._deadlines if each[2].waiting]
            heapq.heapify(self._deadlines)
        if len(self._heap) > most:
            self._heap = [each for each in self._heap if each[2].waiting]
            heapq.heapify(self._heap)

    def _enqueue(self, queued: Queued) -> None:
        head_start_ns = round(queued.request.priority * self._config.aging_s * 1e9)
        rank = queued.arrived_ns - head_start_ns
        heapq.heappush(self._heap, (rank, next(self._order), queued))

    @staticmethod
    def _dispatch(queued: Queued, chosen: tuple[SequenceSpec, ...], now_ns: int) -> Dispatch:
        request = queued.request
        held = StageTime(stage="fairness", start_ns=queued.arrived_ns, end_ns=now_ns)
        return Dispatch(
            info=msgspec.structs.replace(request.info, stages=(*request.info.stages, held)),
            token_ids=request.token_ids,
            sampling=request.sampling,
            sequences=chosen,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
