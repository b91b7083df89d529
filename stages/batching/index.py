"""The sequences that have not ended, by id, by request and by deadline."""

from __future__ import annotations

from ...bus.messages import RequestInfo
from ..lazy_heap import LazyHeap
from .sequence import Sequence


class SequenceIndex(dict[int, Sequence]):
    """All waiting, running and paused sequences, by id."""

    def __init__(self) -> None:
        super().__init__()
        self._by_request: dict[str, dict[int, Sequence]] = {}
        self.deadlines: LazyHeap[RequestInfo] = LazyHeap(lambda _, info: self._is_alive(info))

    def of_request(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request."""
        return list(self._by_request.get(request_id, {}).values())

    def requests(self) -> list[RequestInfo]:
        """Return all requests with sequences."""
        return [next(iter(samples.values())).info for samples in self._by_request.values()]

    def add(self, seq: Sequence, deadline_ns: int | None = None) -> None:
        """Add a sequence, and its request's deadline with the first one."""
        self[seq.seq_id] = seq
        if deadline_ns is not None and seq.info.request_id not in self._by_request:
            self.deadlines.push(deadline_ns, seq.info)
        self._by_request.setdefault(seq.info.request_id, {})[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended."""
        del self[seq.seq_id]
        samples = self._by_request[seq.info.request_id]
        del samples[seq.seq_id]
        if not samples:
            del self._by_request[seq.info.request_id]

    def check(self, alive: list[Sequence]) -> None:
        """Check that exactly these sequences are here, each once.

        Raises:
            AssertionError: They aren't.
        """
        assert len(alive) == len(self), "a sequence is lost, or in two places"
        assert set(self.values()) == set(alive), "a sequence is not in the index"

    def clear(self) -> None:
        """Remove all sequences and deadlines."""
        super().clear()
        self._by_request.clear()
        self.deadlines.clear()

    def _is_alive(self, info: RequestInfo) -> bool:
        samples = self._by_request.get(info.request_id, {}).values()
        return any(seq.info.entry_id == info.entry_id for seq in samples)
