"""Announced sequences, which continue here after their first token on another replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from .....bus.control import ReplicaCapacity
from .....bus.links import HandoverMessage
from .....bus.messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    Handover,
    RemoteBlocks,
    RequestInfo,
    WithdrawSequences,
)
from .....bus.parts.handover import HandoverRoute
from .....bus.sections import with_sections
from .....config import EngineConfig
from ...sequence import Sequence
from .. import Core, Part


@dataclass(slots=True)
class Arrival:
    """An announced sequence.

    Attributes:
        request: With this sequence alone.
        seq: The sequence, which doesn't wait yet.
        deadline_ns: Deadline of the request.
        cancelled: Whether the request has ended here; the other replica may still hand it over.
        num_messages: Number of batching's messages about it so far.
    """

    request: AdmittedRequest
    seq: Sequence
    deadline_ns: int | None
    cancelled: bool = False
    num_messages: int = 1


class Arrivals(Part):
    """Sequences that are computed elsewhere, and whose blocks come in the meantime.

    An announced sequence takes no place in the index, no block and no step, so that a replica with
    nothing else is idle. Its place in the batch is promised by fairness. It ends here with its
    handover or its withdrawal, whatever happens to its request.
    """

    handles = (AnnounceSequence, AnnounceBlocks, Handover, WithdrawSequences)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._arrivals: dict[int, Arrival] = {}
        # Of these, sequences with announced blocks that may not be fetched yet.
        self._fetching: dict[int, Sequence] = {}
        # First tokens that came before messages of batching that were sent first.
        self._tokens: dict[int, Handover] = {}
        # For `admit`: blocks that were fetched for a sequence that arrives.
        self._num_fetched = 0

    def receive(
        self, message: HandoverMessage, now_ns: int, deadline_ns: int | None
    ) -> RequestInfo | None:
        """Apply another replica's message; return the request that is handed over with it."""
        match message:
            case AnnounceSequence(request):
                self._announce(request, deadline_ns)
                return self._arrive(request.sequences[0].seq_id)
            case AnnounceBlocks():
                self._add_blocks(message)
                return self._arrive(message.seq_id)
            case Handover(seq_id):
                self._tokens[seq_id] = message
                return self._arrive(seq_id)
            case WithdrawSequences(seq_ids):
                for seq_id in seq_ids:
                    self._arrivals.pop(seq_id, None)
                    self._fetching.pop(seq_id, None)
            case _:
                assert_never(message)
        return None

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        if (remote := remote_of(request)) is not None:
            seq.handed_over = True
            seq.allocation.max_reuse = seq.max_reuse()
            seq.allocation.num_fetched = self._num_fetched
            self.core.cache.below.expect(seq.allocation, remote)

    def begin(self, now_ns: int) -> None:
        """Fetch announced blocks, as far as there is room for them."""
        if self.core.paused or self.core.lacks:
            return
        cache = self.core.cache
        for seq_id, seq in [*self._fetching.items()]:
            cache.match(seq.allocation)
            cache.below.fetch(seq.allocation, ahead=True)
            if seq.allocation.num_fetched >= len(seq.allocation.remote):
                del self._fetching[seq_id]

    def ends_elsewhere(self, request_id: str) -> bool:
        found = False
        for seq_id, arrival in self._arrivals.items():
            if arrival.request.info.request_id == request_id:
                found = arrival.cancelled = True
                self._fetching.pop(seq_id, None)
        return found

    def requests(self) -> Iterable[RequestInfo]:
        alive = (each.request.info for each in self._arrivals.values() if not each.cancelled)
        return [*{info.request_id: info for info in alive}.values()]

    def reset(self) -> None:
        self._arrivals.clear()
        self._fetching.clear()
        self._tokens.clear()

    def _announce(self, request: AdmittedRequest, deadline_ns: int | None) -> None:
        (spec,) = request.sequences
        before = self._arrivals.get(spec.seq_id)
        arrival = Arrival(request, self.core.new_sequence(request, spec), deadline_ns)
        if before is not None:
            arrival.cancelled, arrival.num_messages = before.cancelled, before.num_messages + 1
        self._arrivals[spec.seq_id] = arrival
        if not arrival.cancelled:
            self._fetching[spec.seq_id] = arrival.seq

    def _add_blocks(self, more: AnnounceBlocks) -> None:
        arrival = self._arrivals[more.seq_id]
        arrival.num_messages += 1
        if (remote := remote_of(arrival.request)) is None:
            return
        remote = msgspec.structs.replace(
            remote, blocks=remote.blocks + more.blocks, states=remote.states + more.states
        )
        arrival.request = with_sections(arrival.request, HandoverRoute(remote=remote))
        self.core.cache.below.expect(arrival.seq.allocation, remote)
        if not arrival.cancelled:
            self._fetching[more.seq_id] = arrival.seq

    def _arrive(self, seq_id: int) -> RequestInfo | None:
        """Let a sequence wait to run if its first token and all earlier messages are there."""
        arrival, handover = self._arrivals.get(seq_id), self._tokens.get(seq_id)
        if not (arrival and handover and arrival.num_messages == handover.num_messages):
            return None
        del self._arrivals[seq_id], self._tokens[seq_id]
        self._fetching.pop(seq_id, None)
        request = arrival.request
        if arrival.cancelled:
            self.core.report.end(seq_id)
            return request.info
        (spec,) = request.sequences
        spec = msgspec.structs.replace(spec, generated=(*spec.generated, *handover.token_ids))
        self._num_fetched = arrival.seq.allocation.num_fetched
        self.core.add(msgspec.structs.replace(request, sequences=(spec,)), arrival.deadline_ns)
        self._num_fetched = 0
        return request.info


def remote_of(request: AdmittedRequest) -> RemoteBlocks | None:
    """Return the blocks of a request's one sequence in another executor's memory."""
    route = HandoverRoute.find(request.parts)
    return route.remote if route is not None else None
