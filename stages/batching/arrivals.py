"""Announced sequences, which continue here behind their first token on another replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from ...bus.links import HandoverMessage
from ...bus.messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    Handover,
    RequestInfo,
    SequenceSpec,
    WithdrawSequences,
)
from ...bus.parts.handover import HandoverRoute
from ...bus.sections import with_sections
from .cache import KVCacheManager
from .sequence import Sequence


@dataclass(slots=True)
class Arrival:
    """An announced sequence.

    Attributes:
        request: With this sequence alone.
        seq: The sequence, which doesn't wait yet; None if it can't run here.
        deadline_ns: Of the request.
        cancelled: Whether the request has ended here; the other replica may still hand it over.
        num_messages: Of batching about it, so far.
    """

    request: AdmittedRequest
    seq: Sequence | None
    deadline_ns: int | None
    cancelled: bool = False
    num_messages: int = 1


class Arrivals:
    """Sequences that are computed elsewhere, and whose blocks come in the meantime.

    An announced sequence takes no place in the index, no block and no step, so that a replica with
    nothing else is idle. Its place in the batch is promised by fairness. It ends here with its
    handover or its withdrawal, whatever happens to its request.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        make: Callable[[AdmittedRequest, SequenceSpec], Sequence | None],
    ) -> None:
        """Args: the cache; and what makes a sequence, or None if it can't run here."""
        self._cache = cache
        self._make = make
        self._arrivals: dict[int, Arrival] = {}
        # Of these, sequences with announced blocks that may not be fetched yet.
        self._fetching: dict[int, Sequence] = {}
        # First tokens that came before messages of batching that were sent first.
        self._tokens: dict[int, Handover] = {}

    @property
    def fetching(self) -> bool:
        """Whether `fetch` may have something to do."""
        return bool(self._fetching)

    def apply(self, message: HandoverMessage, deadline_ns: int | None) -> Arrival | None:
        """Apply another replica's message; return the sequence that is handed over with it.

        `deadline_ns`: of the request that is announced.
        """
        match message:
            case AnnounceSequence(request):
                self._add(request, deadline_ns)
                return self._take(request.sequences[0].seq_id)
            case AnnounceBlocks():
                self._add_blocks(message)
                return self._take(message.seq_id)
            case Handover(seq_id):
                self._tokens[seq_id] = message
                return self._take(seq_id)
            case WithdrawSequences(seq_ids):
                for seq_id in seq_ids:
                    self._arrivals.pop(seq_id, None)
                    self._fetching.pop(seq_id, None)
            case _:
                assert_never(message)
        return None

    def fetch(self) -> None:
        """Fetch announced blocks, as far as there is room for them."""
        for seq_id, seq in [*self._fetching.items()]:
            self._cache.match(seq.lease)
            self._cache.fetch(seq.lease, ahead=True)
            if seq.lease.num_fetched >= len(seq.lease.remote):
                del self._fetching[seq_id]

    def cancel(self, request_id: str) -> bool:
        """Let a request's sequences not run; return whether there are any."""
        found = False
        for seq_id, arrival in self._arrivals.items():
            if arrival.request.info.request_id == request_id:
                found = arrival.cancelled = True
                self._fetching.pop(seq_id, None)
        return found

    def requests(self) -> list[RequestInfo]:
        """Return the requests of all sequences that are not cancelled."""
        alive = (each.request.info for each in self._arrivals.values() if not each.cancelled)
        return [*{info.request_id: info for info in alive}.values()]

    def clear(self) -> None:
        """Expect nothing."""
        self._arrivals.clear()
        self._fetching.clear()
        self._tokens.clear()

    def _add(self, request: AdmittedRequest, deadline_ns: int | None) -> None:
        (spec,) = request.sequences
        before = self._arrivals.get(spec.seq_id)
        arrival = Arrival(request, self._make(request, spec), deadline_ns)
        if before is not None:
            arrival.cancelled, arrival.num_messages = before.cancelled, before.num_messages + 1
        self._arrivals[spec.seq_id] = arrival
        if arrival.seq is not None and not arrival.cancelled:
            self._fetching[spec.seq_id] = arrival.seq

    def _add_blocks(self, more: AnnounceBlocks) -> None:
        arrival = self._arrivals[more.seq_id]
        arrival.num_messages += 1
        remote = arrival.request.remote
        if arrival.seq is None or remote is None:
            return
        remote = msgspec.structs.replace(remote, blocks=remote.blocks + more.blocks)
        arrival.request = with_sections(arrival.request, HandoverRoute(remote=remote))
        self._cache.expect(arrival.seq.lease, remote)
        if not arrival.cancelled:
            self._fetching[more.seq_id] = arrival.seq

    def _take(self, seq_id: int) -> Arrival | None:
        """Return a sequence if its first token and all messages that come first are there."""
        arrival, handover = self._arrivals.get(seq_id), self._tokens.get(seq_id)
        if not (arrival and handover and arrival.num_messages == handover.num_messages):
            return None
        del self._arrivals[seq_id], self._tokens[seq_id]
        self._fetching.pop(seq_id, None)
        (spec,) = arrival.request.sequences
        generated = (*spec.generated, *handover.token_ids)
        spec = msgspec.structs.replace(spec, generated=generated)
        arrival.request = msgspec.structs.replace(arrival.request, sequences=(spec,))
        if arrival.seq is not None:
            arrival.seq.go_on_behind(generated)
        return arrival
