"""Sequences that another replica continues once they have their first token here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ...bus.links import HandoverMessage
from ...bus.messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    Handover,
    KVMove,
    RemoteBlocks,
    StepSummary,
    WithdrawSequences,
)
from .cache import KVCacheManager
from .index import SequenceIndex
from .sequence import Sequence


@dataclass(slots=True)
class Departure:
    """A message to the replica that continues a sequence.

    Attributes:
        successor: Number of the replica.
        message: For its batching stage.
        deadline_ns: Of the request, if the message has it.
    """

    successor: int
    message: HandoverMessage
    deadline_ns: int | None = None


@dataclass(slots=True)
class _Leaver:
    """A sequence that is to leave.

    Attributes:
        successor: Number of the replica that continues it.
        request: As the successor gets it, but for its blocks.
        deadline_ns: Of the request.
        announced: Whether the successor has been sent the sequence.
    """

    successor: int
    request: AdmittedRequest
    deadline_ns: int | None
    announced: bool = False


class Handovers:
    """Announces sequences to the replicas that continue them, offers their blocks, and hands them
    over with their first token.

    Blocks are offered by the steps that compute them, and announced with the plans of these steps:
    the successor waits for the last step's blocks, not for a message about them.
    """

    def __init__(self, cache: KVCacheManager, index: SequenceIndex) -> None:
        """Args: the cache, and the sequences that have not ended."""
        self._cache = cache
        self._index = index
        self._leavers: dict[int, _Leaver] = {}
        # Sequences whose first token is in flight, and the step that samples it.
        self._sampling: dict[int, int] = {}
        self._departures: list[Departure] = []

    def __bool__(self) -> bool:
        return bool(self._leavers)

    def add(self, request: AdmittedRequest, deadline_ns: int | None) -> None:
        """Note where the sequences of a dispatch continue."""
        for spec, successor in zip(request.sequences, request.successors, strict=True):
            own = msgspec.structs.replace(request, sequences=(spec,), successors=())
            self._leavers[spec.seq_id] = _Leaver(successor, own, deadline_ns)

    def offer(self, seqs: Iterable[Sequence], step_id: int, now_ns: int) -> list[KVMove]:
        """Offer the full blocks that the plan being made computes, and announce them."""
        moves: list[KVMove] = []
        for seq in seqs:
            if (leaver := self._leavers.get(seq.seq_id)) is None or not seq.hands_over:
                continue
            first, offered = self._cache.offer(seq.seq_id, seq.lease, seq.num_scheduled, now_ns)
            moves += offered
            blocks = tuple((move.name, move.slot, step_id) for move in offered)
            if not leaver.announced or (offered and not first):
                leaver.announced = True
                remote = self._describe(seq, blocks)
                request = msgspec.structs.replace(leaver.request, remote=remote)
                self._send(leaver, AnnounceSequence(request))
            elif offered:
                self._send(leaver, AnnounceBlocks(seq.seq_id, blocks))
            if seq.num_planned > len(seq.token_ids):
                self._sampling[seq.seq_id] = step_id
        return moves

    def absorb(self, result: StepSummary) -> list[Sequence]:
        """Hand over the sequences that have their first token; return them.

        Call it when those that ended with the token are no longer in the index.
        """
        leaving: list[Sequence] = []
        for seq_id, step_id in [*self._sampling.items()] if self._sampling else ():
            if step_id != result.step_id:
                continue
            del self._sampling[seq_id]
            seq = self._index.get(seq_id)
            if seq is None or seq_id not in result.seq_ids:  # it has ended, or is about to
                self.release((seq_id,))
            else:
                generated = tuple(seq.token_ids[seq.num_prompt_tokens :])
                self._send(self._leavers[seq_id], Handover(seq_id, generated, result.end_ns))
                seq.left = True
                leaving.append(seq)
        return leaving

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that has left, or has ended, which its successor is sent."""
        leaver = self._leavers.pop(seq.seq_id, None)
        if leaver is not None and leaver.announced and not seq.left:
            self.release((seq.seq_id,))
            self._send(leaver, WithdrawSequences((seq.seq_id,)))

    def take_departures(self) -> list[Departure]:
        """Return messages to other replicas. Call it after each `absorb` and `plan`."""
        departures, self._departures = self._departures, []
        return departures

    def release(self, seq_ids: Iterable[int]) -> None:
        """Give back the slots of blocks that were offered for sequences."""
        if self._cache.tiers is not None:
            for seq_id in seq_ids:
                self._cache.tiers.release_offer(seq_id)

    def forget_plans(self) -> None:
        """Note that the plans in flight never come back."""
        self._sampling.clear()

    def clear(self) -> None:
        """Drop all sequences."""
        self._leavers.clear()
        self._sampling.clear()
        self._departures.clear()

    def _send(self, leaver: _Leaver, message: HandoverMessage) -> None:
        deadline_ns = leaver.deadline_ns if isinstance(message, AnnounceSequence) else None
        self._departures.append(Departure(leaver.successor, message, deadline_ns))

    def _describe(self, seq: Sequence, blocks: tuple[tuple[bytes, int, int], ...]) -> RemoteBlocks:
        tiers = self._cache.tiers
        return RemoteBlocks(
            address=tiers.capacity.address if tiers is not None else "",
            layout=tiers.capacity.layout if tiers is not None else "",
            weights=tiers.capacity.weights if tiers is not None else "",
            weight_version=self._cache.weight_version,
            adapter_version=seq.lease.scope.adapter_version,
            blocks=blocks,
        )
