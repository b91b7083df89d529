"""Which stages take part in an epoch.

Where there are several replicas, an epoch waits for those that are known to live, and for the
others no longer than `PATIENCE_S`; one is enough. What a replica had is lost with it, and a new
epoch begins, in which the others take that up. A replica that comes later takes part in the epoch
that there is: it has no part in what is under way.
"""

from __future__ import annotations

import msgspec

from ...bus.control import ReplicaCapacity
from ...config import all_roles, role_of, split_role
from ...store.board import LoadedAdapter
from .replicas import is_replicated, smallest

PATIENCE_S = 1.0
"""How long an epoch waits for replicas of which it is not known whether they live."""


class Participants:
    """The stages besides admission: who is missing in this epoch, who was heard, who has left."""

    def __init__(self, replicas: int) -> None:
        """`replicas`: how many pairs of batching and executor there are, at the most."""
        self.roles = all_roles(replicas)[1:]
        self._replicas = replicas
        # Of this epoch: roles that it waits for, roles that take part, and until when it waits
        # for replicas that may not be there.
        self._missing: set[str] = set(self.roles)
        self._heard: set[str] = set()
        self._patient_until_ns = 0
        # Roles that have left and not come back, as far as is known here.
        self._left: set[str] = set()
        self._capacities: dict[str, ReplicaCapacity] = {}

    @property
    def missing(self) -> list[str]:
        """Roles that the epoch waits for."""
        return [role for role in self.roles if role in self._missing]

    def is_missing(self, role: str) -> bool:
        """Whether the epoch waits for a role."""
        return role in self._missing

    def begin(self, now_ns: int) -> None:
        """A new epoch: it waits for all."""
        self._missing = set(self.roles)
        self._heard.clear()
        self._capacities.clear()
        self._patient_until_ns = now_ns + int(PATIENCE_S * 1e9)

    def hear(self, role: str) -> bool:
        """A role takes part. Returns whether the epoch has waited for it."""
        self._heard.add(role)
        self._left.discard(role)
        waited = role in self._missing
        self._missing.discard(role)
        return waited

    def hold(self, role: str, capacity: ReplicaCapacity) -> ReplicaCapacity:
        """What a replica can hold; returns what fits each: a request may come to any of them."""
        self._capacities[role] = capacity
        return smallest(self._capacities.values())

    def change_adapters(
        self, role: str, adapters: tuple[LoadedAdapter, ...]
    ) -> ReplicaCapacity | None:
        """A replica has other adapters; returns as `hold`, None of one that takes no part."""
        if role not in self._capacities:
            return None
        return self.hold(role, msgspec.structs.replace(self._capacities[role], adapters=adapters))

    def come(self, role: str) -> None:
        """A role is up; it has not yet said that it takes part."""
        self._left.discard(role)

    def leave(self, role: str) -> None:
        """A role is gone."""
        self._left.add(role)

    def dismiss_missing(self) -> list[str]:
        """Waits for nobody any more; returns whom it has waited for."""
        missing = sorted(self._missing)
        self._missing.clear()
        return missing

    def are_enough(self, now_ns: int) -> bool:
        """Whether the epoch may go on: all take part, or all that are missing can be done without.

        Replicas can be done without if another takes part and they have left, or have kept the
        epoch waiting for `PATIENCE_S`.
        """
        if not self._missing:
            return True
        replicas = {split_role(role)[1] for role in self._missing if is_replicated(role)}
        if len(replicas) == self._replicas or not all(map(is_replicated, self._missing)):
            return False
        left = {split_role(role)[1] for role in self._left if is_replicated(role)}
        return replicas <= left or now_ns >= self._patient_until_ns

    def patience_ends_ns(self) -> int | None:
        """When those that take part are enough without the others; None if they never are."""
        return self._patient_until_ns if self.are_enough(self._patient_until_ns) else None

    def num_replicas(self) -> int:
        """How many replicas take part."""
        return sum(role_of("batching", replica) in self._heard for replica in range(self._replicas))

    def first_executor(self) -> int:
        """The first replica whose executor takes part; 0 while none does."""
        replicas = range(self._replicas)
        return next(
            (replica for replica in replicas if role_of("executor", replica) in self._heard), 0
        )

    def is_apart(self, role: str) -> bool:
        """Whether a role is of a replica of which nothing was heard in this epoch.

        Batching says that it takes part before fairness hears of it, and the executor before
        batching does; so nothing has been sent to such a replica.
        """
        if not is_replicated(role):
            return False
        batching = role_of("batching", split_role(role)[1])
        return role not in self._heard and batching not in self._heard
