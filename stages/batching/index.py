"""The sequences that have not ended, found by their ids, their requests and their deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ...bus.messages import RequestInfo
from .sequence import Sequence

LEFTOVERS_KEPT = 256
"""Deadlines of requests that have ended that may be left, before they are looked through."""


class SequenceIndex:
    """All sequences that have not ended, wherever they are: they wait, run or are paused.

    Deadlines are those of requests. One whose request was done in time is left for a while: it is
    taken out when its time comes, or when there are too many of them.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, dict[int, Sequence]] = {}
        # (deadline, request id, entry id), the earliest first.
        self._deadlines: list[tuple[int, str, str]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __getitem__(self, seq_id: int) -> Sequence:
        return self._by_id[seq_id]

    def get(self, seq_id: int) -> Sequence | None:
        """A sequence; None when it has ended."""
        return self._by_id.get(seq_id)

    def of_request(self, request_id: str) -> list[Sequence]:
        """The sequences of a request, none when all have ended."""
        return list(self._by_request.get(request_id, {}).values())

    def requests(self) -> list[RequestInfo]:
        """The requests that have not ended."""
        return [next(iter(samples.values())).info for samples in self._by_request.values()]

    def add(self, seq: Sequence) -> None:
        """A sequence has come."""
        self._by_id[seq.seq_id] = seq
        self._by_request.setdefault(seq.info.request_id, {})[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended."""
        del self._by_id[seq.seq_id]
        samples = self._by_request[seq.info.request_id]
        del samples[seq.seq_id]
        if not samples:
            del self._by_request[seq.info.request_id]

    def clear(self) -> None:
        """Forgets all sequences and deadlines."""
        self._by_id.clear()
        self._by_request.clear()
        self._deadlines.clear()

    # --- deadlines ----------------------------------------------------------------------------

    @property
    def num_deadlines(self) -> int:
        """Deadlines that are kept, those of requests that have ended among them."""
        return len(self._deadlines)

    def add_deadline(self, info: RequestInfo, deadline_ns: int) -> None:
        """A request has time until then."""
        heapq.heappush(self._deadlines, (deadline_ns, info.request_id, info.entry_id))
        if self.num_deadlines > 2 * len(self._by_request) + LEFTOVERS_KEPT:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_request]
            heapq.heapify(self._deadlines)

    def next_deadline_ns(self) -> int | None:
        """The earliest; None when there is none."""
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now_ns: int) -> Iterator[tuple[str, str]]:
        """(request id, entry id) of requests whose time is over and that have not ended.

        Each comes once.
        """
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, request_id, entry_id = heapq.heappop(self._deadlines)
            if any(seq.info.entry_id == entry_id for seq in self.of_request(request_id)):
                yield request_id, entry_id
