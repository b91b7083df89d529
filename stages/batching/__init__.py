"""The batching stage: what fits in the next step."""

from .cache import CacheAllocation, KVCacheManager, Lease, OutOfBlocks, PrefixMatch
from .core import BatchingCore
from .paged import NO_PREFIX, PagedKVCache, chain_root, compute_block_hash
from .radix import RadixKVCache
from .schedule import SchedulerOutput, schedule
from .sequence import Sequence, SequenceStatus

__all__ = [
    "NO_PREFIX",
    "BatchingCore",
    "CacheAllocation",
    "KVCacheManager",
    "Lease",
    "OutOfBlocks",
    "PagedKVCache",
    "PrefixMatch",
    "RadixKVCache",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "chain_root",
    "compute_block_hash",
    "schedule",
]
