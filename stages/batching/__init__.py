"""The batching stage: what fits in the next step."""

from .cache import CacheAllocation, PagedKVCache, compute_block_hash
from .core import BatchingCore
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence, SequenceStatus

__all__ = [
    "BatchingCore",
    "CacheAllocation",
    "PagedKVCache",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "compute_block_hash",
    "schedule",
]
