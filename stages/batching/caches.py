"""What follows from a lane's settings and capacity: its cache, and the limits of its steps."""

from __future__ import annotations

from ...bus.control import ReplicaCapacity
from ...config import EngineConfig, SchedulerConfig
from .cache import KVCacheManager
from .paged import PagedKVCache
from .radix import RadixKVCache

CACHES: dict[str, type[KVCacheManager]] = {"paged": PagedKVCache, "radix": RadixKVCache}


def make_cache(config: EngineConfig, capacity: ReplicaCapacity) -> KVCacheManager:
    """The cache of a lane, with nothing in it."""
    return CACHES[config.cache_type](capacity.num_blocks, capacity.block_size)


def limits_of(config: EngineConfig, capacity: ReplicaCapacity) -> SchedulerConfig:
    """What a step may have at the most."""
    return SchedulerConfig(
        max_batch_size=capacity.max_batch_size,
        max_tokens_per_batch=config.max_tokens_per_batch,
        block_size=capacity.block_size,
    )
