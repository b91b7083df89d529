"""Stages that take part in an epoch.

With several replicas, an epoch waits for those that are known to live, and at most `PATIENCE_S` for
the others; one is enough. When a replica is lost, a new epoch begins, in which the others take its
requests over. A replica that comes later joins the current epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ...bus.control import ReplicaCapacity
from ...bus.parts.adapters import AdapterCapacity, adapters_of
from ...bus.parts.recipes import FingerprintCapacity
from ...bus.public import Fingerprint
from ...bus.sections import with_sections
from ...config import REPLICATED, all_roles, role_of, split_role
from ...store.loaded_adapter import LoadedAdapter


def is_replicated(role: str) -> bool:
    """Return whether a role is a stage of a replica."""
    return split_role(role)[0] in REPLICATED


def smallest(capacities: Collection[ReplicaCapacity]) -> ReplicaCapacity:
    """Return the capacity that fits each of several executors of one model.

    It is exact only while all have the same versions of weights and adapters, and compute the same
    bits.
    """
    first, *_ = capacities
    fingerprints = _different(capacities)
    same_versions = len(set(map(_versions, capacities))) == 1
    same_bits = not differing_fields(fingerprints)
    parts = FingerprintCapacity(fingerprints).replaced_in(first.parts)
    adapters = _common(list(map(adapters_of, capacities)))
    return msgspec.structs.replace(
        first,
        num_blocks=min(capacity.num_blocks for capacity in capacities),
        max_model_len=min(capacity.max_model_len for capacity in capacities),
        exact=all(each.exact for each in capacities) and same_versions and same_bits,
        parts=AdapterCapacity(adapters).replaced_in(parts),
    )


def fingerprints_of(capacity: ReplicaCapacity) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of executors in a capacity."""
    found = FingerprintCapacity.find(capacity.parts)
    return found.fingerprints if found is not None else ()


def _versions(capacity: ReplicaCapacity) -> tuple[int, frozenset[tuple[str, int]]]:
    """Return the versions of a replica's weights and adapters."""
    adapters = frozenset((adapter.id, adapter.version) for adapter in adapters_of(capacity))
    return capacity.weight_version, adapters


def _different(capacities: Collection[ReplicaCapacity]) -> tuple[Fingerprint, ...]:
    """Return the executors' fingerprints, each once."""
    found = {each.digest: each for capacity in capacities for each in fingerprints_of(capacity)}
    return tuple(found[digest] for digest in sorted(found))


def differing_fields(fingerprints: Sequence[Fingerprint]) -> list[str]:
    """Return the fields, besides weights, that change the bits and differ between executors, such
    as "kernels" if one had no compiler."""
    others = {"digest", "weights", "weight_version"}
    return [
        name
        for name in Fingerprint.__struct_fields__
        if name not in others
        and any(getattr(each, name) != getattr(fingerprints[0], name) for each in fingerprints)
    ]


def _common(adapters: Collection[tuple[LoadedAdapter, ...]]) -> tuple[LoadedAdapter, ...]:
    """Return the adapters that each replica has, in the oldest of their versions."""
    first, *others = adapters
    by_id = [{adapter.id: adapter for adapter in each} for each in others]
    return tuple(
        min([adapter, *(each[adapter.id] for each in by_id)], key=lambda each: each.version)
        for adapter in first
        if all(adapter.id in each for each in by_id)
    )


PATIENCE_S = 1.0
"""Longest wait of an epoch for replicas that may not be alive, in seconds."""


class Participants:
    """The stages besides admission: missing in this epoch, taking part, or stopped.

    Attributes:
        roles: All of them.
        left: Roles that have stopped and not started again.
    """

    def __init__(self, replicas: int) -> None:
        """`replicas`: the configured number of pairs of batching and executor."""
        self.roles = all_roles(replicas)[1:]
        self._replicas = replicas
        # Of this epoch: roles that it waits for, roles that take part, and the longest wait for
        # replicas.
        self._missing: set[str] = set(self.roles)
        self._heard: set[str] = set()
        self._patient_until_ns = 0
        self.left: set[str] = set()
        self._capacities: dict[str, ReplicaCapacity] = {}

    @property
    def heard(self) -> frozenset[str]:
        """Roles that take part."""
        return frozenset(self._heard)

    @property
    def missing(self) -> list[str]:
        """Roles that the epoch waits for."""
        return [role for role in self.roles if role in self._missing]

    def begin(self, now_ns: int) -> None:
        """Begin an epoch, which waits for all roles."""
        self._missing = set(self.roles)
        self._heard.clear()
        self._capacities.clear()
        self._patient_until_ns = now_ns + int(PATIENCE_S * 1e9)

    def hear(self, role: str) -> bool:
        """Add a role that takes part; return whether the epoch has waited for it."""
        self._heard.add(role)
        self.left.discard(role)
        waited = role in self._missing
        self._missing.discard(role)
        return waited

    def hold(self, role: str, capacity: ReplicaCapacity) -> ReplicaCapacity:
        """Set a replica's capacity; return the capacity that fits every replica."""
        self._capacities[role] = capacity
        return smallest(self._capacities.values())

    def change_adapters(
        self, role: str, adapters: tuple[LoadedAdapter, ...]
    ) -> ReplicaCapacity | None:
        """Set a replica's adapters; return as `hold`, or None if it doesn't take part."""
        if role not in self._capacities:
            return None
        capacity = with_sections(self._capacities[role], AdapterCapacity(adapters))
        return self.hold(role, capacity)

    def change_weights(self, role: str, version: int) -> ReplicaCapacity | None:
        """Set the version of a replica's weights; return as `change_adapters`."""
        if role not in self._capacities:
            return None
        capacity = msgspec.structs.replace(self._capacities[role], weight_version=version)
        return self.hold(role, capacity)

    def dismiss_missing(self) -> list[str]:
        """Stop waiting; return the roles that were missing."""
        missing = sorted(self._missing)
        self._missing.clear()
        return missing

    def are_enough(self, now_ns: int) -> bool:
        """Return whether the epoch may go on: all roles take part, or only replicas are missing.

        A replica may be missing if another takes part, and it has stopped or the epoch has waited
        `PATIENCE_S` for it.
        """
        if not self._missing:
            return True
        replicas = {split_role(role)[1] for role in self._missing if is_replicated(role)}
        if len(replicas) == self._replicas or not all(map(is_replicated, self._missing)):
            return False
        left = {split_role(role)[1] for role in self.left if is_replicated(role)}
        return replicas <= left or now_ns >= self._patient_until_ns

    def patience_ends_ns(self) -> int | None:
        """Return when the epoch goes on without the missing roles; None for never."""
        return self._patient_until_ns if self.are_enough(self._patient_until_ns) else None

    def num_replicas(self) -> int:
        """Return the number of replicas that take part."""
        return sum(role_of("batching", replica) in self._heard for replica in range(self._replicas))

    def first_executor(self) -> int:
        """Return the first replica whose executor takes part; 0 if none does."""
        replicas = range(self._replicas)
        return next(
            (replica for replica in replicas if role_of("executor", replica) in self._heard), 0
        )

    def is_apart(self, role: str) -> bool:
        """Return whether a role belongs to a replica that has not reported in this epoch.

        Nothing was sent to such a replica: the executor reports before batching does, and batching
        before fairness gets the message.
        """
        if not is_replicated(role):
            return False
        batching = role_of("batching", split_role(role)[1])
        return role not in self._heard and batching not in self._heard
