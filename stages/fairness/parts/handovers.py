"""Replicas with roles: prompts start on some, and sequences continue on others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....bus.messages import AdmittedRequest
from ....bus.parts.handover import HandoverRoute
from ....config import ReplicaRole, split_role
from ..queue import Running
from ..replicas import Replica, choose_replica
from ..state import FairnessState
from . import Part


class Handovers(Part):
    """The replicas' roles, and the places where sequences continue.

    A sequence that starts on a replica that prefills is promised a place on a replica that decodes,
    and takes its credit: the replicas pass the sequence on among themselves. Their reports may come
    in either order. Without a replica for either half of the work, every replica does both.

    Attributes:
        roles: The role of each replica; empty if each does both.
    """

    def __init__(self, core: FairnessState, roles: Sequence[ReplicaRole] = ()) -> None:
        super().__init__(core)
        self.roles = tuple(roles)
        self._releases: dict[str, list[int]] = {}

    def set_roles(self, roles: Sequence[ReplicaRole]) -> None:
        """Replace the replicas' roles. Sequences stay where they run."""
        self.roles = tuple(roles)

    def reset(self, epoch: int) -> None:
        self._releases.clear()

    # --- replicas -----------------------------------------------------------------------------

    def starters(self, replicas: Collection[Replica]) -> Collection[Replica]:
        if not self.roles or not self._are_split(replicas):
            return replicas
        able = [replica for replica in replicas if self._role(replica) != "decode"]
        if self.room(replicas) > 0:
            return able
        return [replica for replica in able if self._role(replica) == "both"]

    def room(self, replicas: Collection[Replica]) -> int:
        """Return the places for sequences that come from replicas that prefill."""
        return sum(replica.credits for replica in self._decoders(replicas))

    def limit(self, request: AdmittedRequest, replica: Replica, number: int) -> int:
        if self._leaves(request, replica):
            return min(number, self.room(self.core.replicas.values()))
        return number

    def section(self, replica: Replica, started: Sequence[Running]) -> HandoverRoute | None:
        """Promise each sequence a place where it continues."""
        if not self._leaves(started[0].request, replica):
            return None
        replicas = self.core.replicas.values()
        return HandoverRoute(tuple([self.promise(running, replicas) for running in started]))

    def _leaves(self, request: AdmittedRequest, replica: Replica) -> bool:
        """Whether sequences of a request that start on a replica continue elsewhere."""
        if not self.roles or request.info.pooling is not None:
            return False
        replicas = self.core.replicas.values()
        return self._role(replica) == "prefill" and self._are_split(replicas)

    def _decoders(self, replicas: Collection[Replica]) -> list[Replica]:
        return [replica for replica in replicas if self._role(replica) != "prefill"]

    def _are_split(self, replicas: Collection[Replica]) -> bool:
        """Whether some replica prefills and some replica decodes."""
        roles = {self._role(replica) for replica in replicas}
        return bool(roles - {"prefill"}) and bool(roles - {"decode"}) and roles != {"both"}

    def _role(self, replica: Replica) -> ReplicaRole:
        number = split_role(replica.name)[1]
        return self.roles[number] if number < len(self.roles) else "both"

    # --- sequences ----------------------------------------------------------------------------

    def promise(self, running: Running, replicas: Collection[Replica]) -> int:
        """Promise a place to a sequence that starts elsewhere; return the replica's number.

        There must be `room`.
        """
        successor = choose_replica(self._decoders(replicas), running.chain)
        assert successor is not None, "no replica has a place"
        successor.credits -= 1
        successor.expected[running.spec.seq_id] = running
        successor.prefixes.add(running.chain)
        running.successor = successor.name
        return split_role(successor.name)[1]

    def reported(self, replica: Replica, seq_id: int) -> None:
        """Let a sequence run where it was expected, if it was: the first report of either side."""
        if (running := replica.expected.pop(seq_id, None)) is not None:
            core = self.core
            core.replicas[running.replica].let_go(running)
            running.giver = running.replica
            core.counts.handovers += 1
            core.run(replica, running, running.level, running.rank)

    def left(self, replica: Replica, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            if (running := replica.running.get(seq_id)) is not None:
                self.reported(self.core.replicas[running.successor], seq_id)
        self.core.count(replica)
        for seq_id in seq_ids:
            replica.gone.pop(seq_id, None)

    def continued(self, running: Running) -> None:
        """Release the blocks of the replica that handed a sequence over."""
        if running.giver:
            self._releases.setdefault(running.giver, []).append(running.spec.seq_id)
            running.giver = ""

    def ended(self, running: Running) -> None:
        """Release the blocks of a sequence, and the place that was promised to it."""
        self.continued(running)
        successor, seq_id = self.core.replicas.get(running.successor), running.spec.seq_id
        if successor is not None and seq_id in successor.expected:
            del successor.expected[seq_id]
            successor.credits += 1

    def take_releases(self) -> dict[str, list[int]]:
        """Return, by replica, the sequences whose offered blocks are not needed any more."""
        releases, self._releases = self._releases, {}
        return releases
