"""The batching stage: what fits in the next step."""

from .allocation import Allocation
from .block_hash import compute_block_hash
from .cache import CacheAllocation, KVCacheManager, OutOfBlocks, PrefixMatch
from .core import BatchingCore
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence, SequenceStatus

__all__ = [
    "Allocation",
    "BatchingCore",
    "CacheAllocation",
    "KVCacheManager",
    "OutOfBlocks",
    "PrefixMatch",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "compute_block_hash",
    "schedule",
]
