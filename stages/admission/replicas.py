"""What admission knows of replicas: pairs of batching and executor."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ...bus.control import LaneCapacity
from ...config import REPLICATED, split_role


def is_replicated(role: str) -> bool:
    """Whether it is a stage of a replica."""
    return split_role(role)[0] in REPLICATED


def smallest(capacities: Collection[LaneCapacity]) -> LaneCapacity:
    """What fits each of several executors. They run one model, so that all else is the same."""
    first, *_ = capacities
    return msgspec.structs.replace(
        first,
        num_blocks=min(capacity.num_blocks for capacity in capacities),
        max_model_len=min(capacity.max_model_len for capacity in capacities),
    )
