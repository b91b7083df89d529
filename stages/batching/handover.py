"""Sequences that another replica continues once they have their first token here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ...bus.links import HandoverMessage
from ...bus.messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    RemoteBlocks,
    WithdrawSequences,
)
from ...bus.parts.handover import HandoverRoute, leaving_of
from ...bus.sections import with_sections
from ...bus.steps import KVMove, StepPlan, StepSummary
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
        num_messages: About it, to the successor.
    """

    successor: int
    request: AdmittedRequest
    deadline_ns: int | None
    num_messages: int = 0


class Offered(NamedTuple):
    """A plan's `kv_offers` and `handovers`."""

    blocks: tuple[KVMove, ...] = ()
    handovers: tuple[tuple[int, int, int], ...] = ()


NOTHING_OFFERED = Offered()


class Handovers:
    """Announces sequences to the replicas that continue them, and offers their blocks.

    Blocks are offered by the steps that compute them, and announced with the plans of these steps:
    the successor waits for the last step's blocks, not for a message about them. The executor sends
    it the first token; by the step's result, batching knows whether it did.
    """

    def __init__(self, cache: KVCacheManager, index: SequenceIndex) -> None:
        """Args: the cache, and the sequences that have not ended."""
        self._cache = cache
        self._index = index
        self._leavers: dict[int, _Leaver] = {}
        # Sequences whose first token is in flight, also those that have ended meanwhile: for them,
        # too, the successor gets a token or a withdrawal.
        self._sampling: dict[int, Sequence] = {}
        self._departures: list[Departure] = []

    def __bool__(self) -> bool:
        return bool(self._leavers)

    def add(self, request: AdmittedRequest, deadline_ns: int | None) -> None:
        """Note where the sequences of a dispatch continue."""
        for spec, successor in zip(request.sequences, request.successors, strict=True):
            own = with_sections(
                msgspec.structs.replace(request, sequences=(spec,)), HandoverRoute()
            )
            self._leavers[spec.seq_id] = _Leaver(successor, own, deadline_ns)

    def offer(self, seqs: Iterable[Sequence], step_id: int, now_ns: int) -> Offered:
        """Offer the full blocks that the plan being made computes, and announce them."""
        moves: list[KVMove] = []
        handovers: list[tuple[int, int, int]] = []
        for seq in seqs:
            if (leaver := self._leavers.get(seq.seq_id)) is None or not seq.hands_over:
                continue
            first, offered = self._cache.offer(seq.seq_id, seq.lease, seq.num_scheduled, now_ns)
            moves += offered
            blocks = tuple((move.name, move.slot, step_id) for move in offered)
            if not leaver.num_messages or (offered and not first):
                remote = self._describe(seq, blocks)
                request = with_sections(leaver.request, HandoverRoute(remote=remote))
                self._send(leaver, AnnounceSequence(request))
            elif offered:
                self._send(leaver, AnnounceBlocks(seq.seq_id, blocks))
            if seq.num_planned > len(seq.token_ids):
                self._sampling[seq.seq_id] = seq
                handovers.append((seq.seq_id, leaver.successor, leaver.num_messages))
        return Offered(tuple(moves), tuple(handovers))

    def absorb(self, plan: StepPlan, result: StepSummary) -> list[Sequence]:
        """Return the sequences that the executor has handed over, which end here.

        Call it when those that ended with their token are no longer in the index.
        """
        leaving: list[Sequence] = []
        for seq_id, *_ in leaving_of(plan.parts):
            seq = self._sampling.pop(seq_id)
            has_ended = seq_id not in self._index
            seq.left = seq_id in result.handed_over
            if not seq.left:
                self.release((seq_id,))
            if has_ended:
                self.forget(seq)
            elif seq.left:
                leaving.append(seq)
        return leaving

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that has left; or has ended, and is withdrawn from its successor."""
        if seq.seq_id in self._sampling:
            return  # The result will say whether the successor was sent its token.
        leaver = self._leavers.pop(seq.seq_id, None)
        if leaver is not None and leaver.num_messages and not seq.left:
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
        sampling, self._sampling = self._sampling, {}
        for seq in sampling.values():
            if seq.seq_id not in self._index:
                self.forget(seq)

    def clear(self) -> None:
        """Drop all sequences."""
        self._leavers.clear()
        self._sampling.clear()
        self._departures.clear()

    def _send(self, leaver: _Leaver, message: HandoverMessage) -> None:
        leaver.num_messages += 1
        deadline_ns = leaver.deadline_ns if isinstance(message, AnnounceSequence) else None
        self._departures.append(Departure(leaver.successor, message, deadline_ns))

    def _describe(self, seq: Sequence, blocks: tuple[tuple[bytes, int, int], ...]) -> RemoteBlocks:
        tiers = self._cache.tiers
        return RemoteBlocks(
            address=tiers.capacity.address if tiers is not None else "",
            layout=tiers.capacity.layout if tiers is not None else "",
            model=tiers.capacity.model if tiers is not None else "",
            weight_version=self._cache.weight_version,
            adapter_version=seq.lease.scope.adapter_version,
            blocks=blocks,
        )
