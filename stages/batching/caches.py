"""The prefix cache of a replica, with its tiers and its log of events."""

from __future__ import annotations

from ...bus.control import ReplicaCapacity, TierCapacity
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
    if (tier_capacity := TierCapacity.find(capacity.parts)) is not None:
        # Otherwise a block computed again may have other bits.
        audit_every = config.kv_audit_every if capacity.exact else 0
        tiers = KVTiers(tier_capacity, size, config.kv_eviction, audit_every, events)
    return CACHES[config.cache_type](capacity.num_blocks, size, tiers, events)
