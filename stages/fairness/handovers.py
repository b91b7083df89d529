"""Replicas with roles, and the sequences that pass from one that prefills to one that decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from ...bus.messages import AdmittedRequest, Handover, RemoteBlocks, SequenceSpec
from ...config import ReplicaRole, split_role
from .queue import Running
from .replicas import Replica


@dataclass(frozen=True)
class HandedOver:
    """A sequence that has its first token, and waits for a replica that decodes.

    Attributes:
        running: The sequence.
        spec: With its generated tokens.
        blocks: Its KV.
        since_ns: When it began to wait here.
    """

    running: Running
    spec: SequenceSpec
    blocks: RemoteBlocks
    since_ns: int

    def message(self) -> AdmittedRequest:
        """Return the message for the replica that continues it."""
        return msgspec.structs.replace(
            self.running.request,
            sequences=(self.spec,),
            rank=self.running.rank,
            hands_over=False,
            remote=self.blocks,
        )


class Handovers:
    """The replicas' roles, and sequences between two replicas, in the order in which they came.

    A prompt starts on a replica that prefills only while a replica that decodes has a place for
    each sequence that comes from there. Without a replica for either half of the work, every
    replica does both.

    Attributes:
        waiting: Sequences that wait for a replica that decodes.
    """

    def __init__(self, roles: Sequence[ReplicaRole] = ()) -> None:
        self._roles = tuple(roles)
        self.waiting: deque[HandedOver] = deque()
        self._releases: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._roles or self.waiting)

    @property
    def roles(self) -> tuple[ReplicaRole, ...]:
        """The role of each replica; empty if each does both."""
        return self._roles

    def configure(self, roles: Sequence[ReplicaRole]) -> None:
        """Replace the roles."""
        self._roles = tuple(roles)

    def clear(self) -> None:
        """Drop all sequences."""
        self.waiting.clear()
        self._releases.clear()

    # --- replicas -----------------------------------------------------------------------------

    def starters(self, replicas: Collection[Replica]) -> Collection[Replica]:
        """Return the replicas on which a prompt may start now."""
        if not self._are_split(replicas):
            return replicas
        able = [replica for replica in replicas if self._role(replica) != "decode"]
        if self.room(replicas) > 0:
            return able
        return [replica for replica in able if self._role(replica) == "both"]

    def decoders(self, replicas: Collection[Replica]) -> Collection[Replica]:
        """Return the replicas on which a sequence may continue."""
        able = [replica for replica in replicas if self._role(replica) != "prefill"]
        return able or replicas

    def room(self, replicas: Collection[Replica]) -> int:
        """Return the places for sequences that come from replicas that prefill."""
        places = -len(self.waiting)
        for replica in replicas:
            if self._role(replica) == "prefill":
                places -= len(replica.running)
            else:
                places += replica.credits
        return places

    def leaves(self, replica: Replica, replicas: Collection[Replica]) -> bool:
        """Whether sequences that start on a replica are handed over."""
        return self._role(replica) == "prefill" and self._are_split(replicas)

    def _are_split(self, replicas: Collection[Replica]) -> bool:
        """Whether some replica prefills and some replica decodes."""
        roles = {self._role(replica) for replica in replicas}
        return bool(roles - {"prefill"}) and bool(roles - {"decode"}) and roles != {"both"}

    def _role(self, replica: Replica) -> ReplicaRole:
        number = split_role(replica.name)[1]
        return self._roles[number] if number < len(self._roles) else "both"

    # --- sequences ----------------------------------------------------------------------------

    def add(self, running: Running, handover: Handover, now_ns: int) -> None:
        """Let a sequence wait that a replica has handed over."""
        running.giver = running.replica
        running.num_tokens += len(handover.generated) - len(running.spec.generated)
        spec = msgspec.structs.replace(running.spec, generated=handover.generated)
        self.waiting.append(HandedOver(running, spec, handover.blocks, now_ns))

    def drop(self, request_id: str) -> list[Running]:
        """Drop the sequences of a request; return them."""
        dropped = [
            each.running
            for each in self.waiting
            if each.running.request.info.request_id == request_id
        ]
        if dropped:
            self.waiting = deque(each for each in self.waiting if each.running not in dropped)
            for running in dropped:
                self.release(running)
        return dropped

    def overdue(self, now_ns: int) -> list[Running]:
        """Return sequences whose deadline is over."""
        runnings = (each.running for each in self.waiting)
        return [r for r in runnings if r.deadline_ns is not None and r.deadline_ns <= now_ns]

    def next_deadline_ns(self) -> int | None:
        """Return the earliest deadline; None if there is none."""
        deadlines = (each.running.deadline_ns for each in self.waiting)
        return min((each for each in deadlines if each is not None), default=None)

    def release(self, running: Running) -> None:
        """Note that the blocks of a sequence are not needed on the replica that handed it over."""
        if running.giver:
            self._releases.setdefault(running.giver, []).append(running.spec.seq_id)
            running.giver = ""

    def take_releases(self) -> dict[str, list[int]]:
        """Return, by replica, the sequences whose offered blocks are not needed any more."""
        releases, self._releases = self._releases, {}
        return releases
