"""Checks that a router's index, made of KV events, is what a cache can find."""

from __future__ import annotations

from collections.abc import Sequence

from nano_inference.bus.kv_events import KVEventBatch, encode_batch
from nano_inference.bus.messages import CacheScope
from nano_inference.stages.batching import KVCacheManager, Lease, PagedKVCache, RadixKVCache
from nano_inference.stages.batching.kv_events import wire_hash

from ...kv_router import Root, Router


def pass_on(cache: KVCacheManager, router: Router) -> None:
    """Send the new events to a router, as bytes."""
    assert cache.events is not None
    if events := cache.events.take():
        router.apply(encode_batch(KVEventBatch(0.0, events, 0)))


def check_router(cache: KVCacheManager, router: Router) -> None:
    """Check that the router has exactly the blocks that can be found.

    Blocks on disk of earlier weights, which only a flush deletes, can't be found.
    """
    pass_on(cache, router)
    assert router.where.get("GPU", set()) == on_device(cache)
    if cache.tiers is not None:
        below = cache.tiers
        off = below.difference is not None
        on_host = set() if off else {wire_hash(name) for name in below._slot_of}
        on_disk = set() if off else {wire_hash(name) for name in below._on_disk}
        assert router.where.get("CPU", set()) == on_host
        assert router.where.get("DISK", set()) <= on_disk
        if not cache.weight_version:
            assert router.where.get("DISK", set()) == on_disk


def on_device(cache: KVCacheManager) -> set[bytes | int]:
    """The hashes of the full blocks that can be found on the device."""
    whole = [b for b in range(cache.num_blocks) if is_whole(cache, b)]
    names = [name for b in whole if (name := cache._names[b]) is not None]
    assert len(set(names)) == len(whole), "a full block has no name"
    return set(map(wire_hash, names))


def is_whole(cache: KVCacheManager, block_id: int) -> bool:
    if isinstance(cache, PagedKVCache):
        return cache._hashes[block_id] is not None
    assert isinstance(cache, RadixKVCache)
    node = cache._nodes[block_id]
    return node is not None and node.end == cache.block_size


def root_of(scope: CacheScope) -> Root:
    """What a router makes of a request's tenant, salt and adapter."""
    keys = (scope.tenant, scope.salt) if scope.tenant else (scope.salt,) * bool(scope.salt)
    return Root(scope.adapter, keys)


def check_match(
    cache: KVCacheManager, router: Router, token_ids: Sequence[int], scope: CacheScope
) -> int:
    """Check that a router finds as much of a prompt as the cache does; return the blocks."""
    lease = Lease(list(token_ids), scope)
    prefix, _, names = cache._fit(lease, cache.num_blocks)
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
