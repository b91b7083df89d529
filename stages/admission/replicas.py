"""What admission knows of replicas: pairs of batching and executor."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ...bus.control import ReplicaCapacity
from ...config import REPLICATED, split_role
from ...store.board import LoadedAdapter


def is_replicated(role: str) -> bool:
    """Whether it is a stage of a replica."""
    return split_role(role)[0] in REPLICATED


def smallest(capacities: Collection[ReplicaCapacity]) -> ReplicaCapacity:
    """What fits each of several executors. They run one model, so that all else is the same."""
    first, *_ = capacities
    return msgspec.structs.replace(
        first,
        num_blocks=min(capacity.num_blocks for capacity in capacities),
        max_model_len=min(capacity.max_model_len for capacity in capacities),
        adapters=_common([capacity.adapters for capacity in capacities]),
    )


def _common(adapters: Collection[tuple[LoadedAdapter, ...]]) -> tuple[LoadedAdapter, ...]:
    """Those that each replica has; of different versions, while it changes, the oldest."""
    first, *others = adapters
    by_id = [{adapter.id: adapter for adapter in each} for each in others]
    return tuple(
        min([adapter, *(each[adapter.id] for each in by_id)], key=lambda each: each.version)
        for adapter in first
        if all(adapter.id in each for each in by_id)
    )
