"""LoRA adapters: loaded ones, changes of their weights, and their versions."""

from __future__ import annotations

from ...store.loaded_adapter import LoadedAdapter
from ..control import ReplicaCapacity
from ..sections import Section


class AdapterCapacity(Section, frozen=True):
    """In ReplicaCapacity: the loaded adapters."""

    adapters: tuple[LoadedAdapter, ...]


def adapters_of(capacity: ReplicaCapacity) -> tuple[LoadedAdapter, ...]:
    """Return the loaded adapters of a replica."""
    found = AdapterCapacity.find(capacity.parts)
    return found.adapters if found is not None else ()


class AdaptersPlan(Section, frozen=True):
    """In StepPlan: adapters whose new weights are to be put in place before the pass.

    Applied after `finished` and before `new`.

    Attributes:
        changes: (id, version) of each; version 0: the executor drops the adapter.
    """

    changes: tuple[tuple[str, int], ...]


class AdaptersResult(Section, frozen=True):
    """In StepResult: `[rows]`, the version of each row's adapter, 0 for none."""

    versions: tuple[int, ...]
