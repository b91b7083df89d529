"""Sequences that another replica continues once they have their first token here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from .....bus.control import ReplicaCapacity
from .....bus.links import HandoverMessage
from .....bus.messages import (
    AdmittedRequest,
    AnnounceBlocks,
    AnnounceSequence,
    ReleaseBlocks,
    RemoteBlocks,
    WithdrawSequences,
)
from .....bus.parts.handover import HandoverRoute, HandoversPlan, HandoversResult
from .....bus.sections import with_sections
from .....bus.steps import StepSummary
from .....config import EngineConfig
from ...plans import PlanDraft, SentPlan
from ...sequence import Sequence
from .. import Core, Part

Offered = tuple[tuple[bytes, int, int], ...]
"""As `blocks` of RemoteBlocks."""


@dataclass(slots=True)
class Departure:
    """A message to the replica that continues a sequence.

    Attributes:
        successor: Number of the replica.
        message: For its batching stage.
        deadline_ns: Deadline of the request, if the message has it.
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
        deadline_ns: Deadline of the request.
        num_messages: About it, to the successor.
    """

    successor: int
    request: AdmittedRequest
    deadline_ns: int | None
    num_messages: int = 0


class Departures(Part):
    """Announces sequences to the replicas that continue them, and offers their blocks.

    Blocks are offered by the steps that compute them, and announced with the plans of these steps:
    the successor waits for the last step's blocks, not for a message about them. The executor sends
    it the first token; the step's result says whether it did.
    """

    handles = (ReleaseBlocks,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._below = core.cache.below
        self._leavers: dict[int, _Leaver] = {}
        # Sequences whose first token is in flight, also those that have ended meanwhile: for them,
        # too, the successor gets a token or a withdrawal.
        self._sampling: dict[int, Sequence] = {}
        self._departures: list[Departure] = []

    def take_departures(self) -> list[Departure]:
        """Return messages to other replicas. Call it after each `absorb` and `plan`."""
        departures, self._departures = self._departures, []
        return departures

    def receive(self, message: ReleaseBlocks, now_ns: int, deadline_ns: int | None) -> None:
        """Give back the slots of blocks that were offered for sequences."""
        for seq_id in message.seq_ids:
            self._below.release_offer(seq_id)

    def accept(self, request: AdmittedRequest, deadline_ns: int | None) -> bool:
        """Note where the sequences of a dispatch continue."""
        route = HandoverRoute.find(request.parts)
        if route is not None and route.successors:
            for spec, successor in zip(request.sequences, route.successors, strict=True):
                own = msgspec.structs.replace(request, sequences=(spec,))
                own = with_sections(own, HandoverRoute())
                self._leavers[spec.seq_id] = _Leaver(successor, own, deadline_ns)
        return True

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        route = HandoverRoute.find(request.parts)
        if route is not None and route.successors:
            seq.hand_over_after_first()

    def planned(self, draft: PlanDraft) -> None:
        """Offer the full blocks that the plan computes, and announce them."""
        leaving: list[tuple[int, int, int]] = []
        for seq in draft.seqs if self._leavers else ():
            if (leaver := self._leavers.get(seq.seq_id)) is None or not seq.hands_over:
                continue
            first, offered = self._below.offer(
                seq.seq_id, seq.allocation, seq.num_scheduled, draft.now_ns
            )
            blocks, states = (
                tuple((m.name, m.slot, draft.step_id) for m in offered if m.state == state)
                for state in (False, True)
            )
            if not leaver.num_messages or (blocks and not first):
                remote = self._describe(seq, blocks, states)
                request = with_sections(leaver.request, HandoverRoute(remote=remote))
                self._send(leaver, AnnounceSequence(request))
            elif offered:
                self._send(leaver, AnnounceBlocks(seq.seq_id, blocks, states))
            if seq.num_planned > len(seq.token_ids):
                self._sampling[seq.seq_id] = seq
                leaving.append((seq.seq_id, leaver.successor, leaver.num_messages))
        if leaving:
            draft.parts.append(HandoversPlan(tuple(leaving)))

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        """Return the sequences that the executor has handed over, which end here."""
        if (planned := HandoversPlan.find(sent.plan.parts)) is None:
            return ()
        done = HandoversResult.find(result.parts)
        leaving: list[Sequence] = []
        for seq_id, *_ in planned.leaving:
            seq = self._sampling.pop(seq_id)
            has_ended = seq_id not in self.core.index or seq_id in result.ended
            seq.left = done is not None and seq_id in done.seq_ids
            if not seq.left:
                self._below.release_offer(seq_id)
            if has_ended:
                self.end(seq)
            elif seq.left:
                leaving.append(seq)
        return leaving

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that has left; or has ended, and is withdrawn from its successor."""
        if not seq.hands_over or seq.seq_id in self._sampling:
            return  # The result will say whether the successor was sent its token.
        leaver = self._leavers.pop(seq.seq_id, None)
        if leaver is not None and leaver.num_messages and not seq.left:
            self._below.release_offer(seq.seq_id)
            self._send(leaver, WithdrawSequences((seq.seq_id,)))

    def lose(self) -> None:
        sampling, self._sampling = self._sampling, {}
        for seq in sampling.values():
            if seq.seq_id not in self.core.index:
                self.end(seq)

    def reset(self) -> None:
        self._leavers.clear()
        self._sampling.clear()
        self._departures.clear()

    def _send(self, leaver: _Leaver, message: HandoverMessage) -> None:
        leaver.num_messages += 1
        deadline_ns = leaver.deadline_ns if isinstance(message, AnnounceSequence) else None
        self._departures.append(Departure(leaver.successor, message, deadline_ns))

    def _describe(self, seq: Sequence, blocks: Offered, states: Offered) -> RemoteBlocks:
        address, layout, model, states_address = self._below.describe()
        return RemoteBlocks(
            address=address,
            layout=layout,
            model=model,
            weight_version=self.core.cache.weight_version,
            adapter_version=seq.allocation.scope.adapter_version,
            blocks=blocks,
            states=states,
            states_address=states_address,
        )
