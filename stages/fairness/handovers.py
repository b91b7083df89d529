"""Replicas with roles: where prompts start, and the places of sequences that continue elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...config import ReplicaRole, split_role
from .queue import Running
from .replicas import Replica, choose_replica


class Handovers:
    """The replicas' roles, and the places where sequences continue.

    A sequence that starts on a replica that prefills is promised a place on a replica that decodes,
    and takes its credit: the replicas pass the sequence on among themselves. Their reports may come
    in either order. Without a replica for either half of the work, every replica does both.
    """

    def __init__(self, roles: Sequence[ReplicaRole] = ()) -> None:
        self._roles = tuple(roles)
        self._releases: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._roles)

    @property
    def roles(self) -> tuple[ReplicaRole, ...]:
        """The role of each replica; empty if each does both."""
        return self._roles

    def configure(self, roles: Sequence[ReplicaRole]) -> None:
        """Replace the roles."""
        self._roles = tuple(roles)

    def clear(self) -> None:
        """Drop all sequences."""
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

    def room(self, replicas: Collection[Replica]) -> int:
        """Return the places for sequences that come from replicas that prefill."""
        return sum(replica.credits for replica in self._decoders(replicas))

    def leaves(self, replica: Replica, replicas: Collection[Replica]) -> bool:
        """Whether sequences that start on a replica are handed over."""
        return self._role(replica) == "prefill" and self._are_split(replicas)

    def _decoders(self, replicas: Collection[Replica]) -> list[Replica]:
        return [replica for replica in replicas if self._role(replica) != "prefill"]

    def _are_split(self, replicas: Collection[Replica]) -> bool:
        """Whether some replica prefills and some replica decodes."""
        roles = {self._role(replica) for replica in replicas}
        return bool(roles - {"prefill"}) and bool(roles - {"decode"}) and roles != {"both"}

    def _role(self, replica: Replica) -> ReplicaRole:
        number = split_role(replica.name)[1]
        return self._roles[number] if number < len(self._roles) else "both"

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

    def break_promise(self, running: Running, replicas: Mapping[str, Replica]) -> None:
        """Free the place of a sequence that has ended where it began."""
        successor, seq_id = replicas.get(running.successor), running.spec.seq_id
        if successor is not None and seq_id in successor.expected:
            del successor.expected[seq_id]
            successor.credits += 1

    def release(self, running: Running) -> None:
        """Note that the blocks of a sequence are not needed on the replica that handed it over."""
        if running.giver:
            self._releases.setdefault(running.giver, []).append(running.spec.seq_id)
            running.giver = ""

    def take_releases(self) -> dict[str, list[int]]:
        """Return, by replica, the sequences whose offered blocks are not needed any more."""
        releases, self._releases = self._releases, {}
        return releases
