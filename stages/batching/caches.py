"""The prefix cache of a replica, with its tiers and its log of events."""

from __future__ import annotations

from ...bus.control import ReplicaCapacity
from ...config import EngineConfig
from .cache import KVCacheManager
from .kv_events import KVEventLog
from .paged import PagedKVCache
from .radix import RadixKVCache
from .tiers import KVTiers

CACHES: dict[str, type[KVCacheManager]] = {"paged": PagedKVCache, "radix": RadixKVCache}


def make_cache(config: EngineConfig, capacity: ReplicaCapacity) -> KVCacheManager:
    """Return an empty cache for an executor, as the settings have it."""
    size = capacity.block_size
    events = KVEventLog(size) if config.kv_events else None
    tiers: KVTiers | None = None
    if capacity.tiers is not None:
        policy = (config.kv_eviction, config.kv_audit_every)
        tiers = KVTiers(capacity.tiers, size, *policy, events)
    return CACHES[config.cache_type](capacity.num_blocks, size, tiers, events)
