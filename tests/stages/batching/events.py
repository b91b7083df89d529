"""Checks that a router's index, made of KV events, is what a cache can find."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.kv_events import KVEventBatch, encode_batch
from nano_inference.bus.messages import CacheScope
from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.stages.batching import Allocation, KVCacheManager
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.parts.kv_events import KVEventLog, KVEvents, wire_hash
from nano_inference.stages.batching.parts.snapshots.part import RecurrentStates
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers
from nano_inference.stages.batching.radix import RadixKVCache

from ...kv_router import Root, Router


def with_parts(
    cache: KVCacheManager, tiers: KVTiers | None = None, events: KVEventLog | None = None
) -> KVCacheManager:
    """Return a cache with these tiers below it, and this log of its blocks, without a core."""
    parts: dict[type, Any] = {}
    core: Any = SimpleNamespace(
        cache=cache,
        limits=SchedulerConfig(8, 64, cache.block_size),
        sent=(),
        rests=True,
        find=parts.get,
    )
    sections = (tiers.capacity,) if tiers is not None else ()
    capacity = ReplicaCapacity(cache.num_blocks, cache.block_size, 99, 9, "none", parts=sections)
    if events is not None:
        parts[KVEvents] = KVEvents(core, EngineConfig(), capacity)
        parts[KVEvents].log = events
    if tiers is not None:
        part = Tiers(core, EngineConfig(), capacity)
        part.blocks, cache.root = tiers, tiers.root
    return cache


def log_of(cache: KVCacheManager) -> KVEventLog:
    (log,) = [each.log for each in cache.followers if isinstance(each, KVEvents)]
    return log


def pass_on(cache: KVCacheManager, router: Router) -> None:
    """Send the new events to a router, as bytes."""
    if events := log_of(cache).take():
        router.apply(encode_batch(KVEventBatch(0.0, events, 0)))


def check_router(cache: KVCacheManager, router: Router) -> None:
    """Check that the router has exactly the blocks that can be found.

    Blocks on disk of earlier weights, which only a flush deletes, can't be found.
    """
    pass_on(cache, router)
    assert router.where.get("GPU", set()) == on_device(cache)
    if isinstance(cache.below, Tiers):
        below = cache.below.blocks
        off = below.difference is not None
        on_host = set() if off else {wire_hash(name) for name in below._slot_of}
        on_disk = set() if off else {wire_hash(name) for name in below._on_disk}
        assert router.where.get("CPU", set()) == on_host
        assert router.where.get("DISK", set()) <= on_disk
        if not cache.weight_version:
            assert router.where.get("DISK", set()) == on_disk
        if cache.below.states is not None:
            states = cache.below.states.units
            on_host = set() if off else {wire_hash(name) for name in states._slot_of}
            assert router.where.get("CPU 1", set()) == on_host
    if isinstance(cache.states, RecurrentStates):
        snapshots = cache.states.snapshots
        found = {wire_hash(name) for name in (*snapshots._kept, *snapshots._owned)}
        assert router.where.get("GPU 1", set()) == found


def on_device(cache: KVCacheManager) -> set[bytes | int]:
    """The hashes of the full blocks that can be found on the device."""
    whole = [b for b in range(cache.num_blocks) if is_whole(cache, b)]
    names = [name for b in whole if (name := cache._names[b]) is not None]
    assert len(set(names)) == len(whole), "a full block has no name"
    return set(map(wire_hash, names))


def is_whole(cache: KVCacheManager, block_id: int) -> bool:
    if isinstance(cache, PagedKVCache):
        return cache._indexed[block_id] is not None
    assert isinstance(cache, RadixKVCache)
    node = cache._nodes[block_id]
    return node is not None and node.end == cache.block_size


def root_of(scope: CacheScope) -> Root:
    """Return a router's root of a request's tenant, salt and adapter."""
    keys = (scope.tenant, scope.salt) if scope.tenant else (scope.salt,) * bool(scope.salt)
    return Root(scope.adapter, keys)


def check_match(
    cache: KVCacheManager, router: Router, token_ids: Sequence[int], scope: CacheScope
) -> int:
    """Check that a router finds as much of a prompt as the cache does; return the blocks."""
    allocation = Allocation(list(token_ids), scope)
    prefix, _, names = cache._fit(allocation, cache.num_blocks)
    most = (len(token_ids) - 1) // cache.block_size
    media = router.find(token_ids, cache.block_size, root_of(scope))[:most]
    found = next((i for i, each in enumerate(media) if "GPU" not in each), len(media))
    assert found == len(prefix.block_ids)
    rest = media[found:]
    on_host = next((i for i, each in enumerate(rest) if "CPU" not in each), len(rest))
    # Of blocks that an earlier start wrote to disk the router knows no tokens.
    ends = len(media) == found + on_host
    assert on_host == len(names) or (ends and on_host < len(names))
    return found + on_host
