"""Shards of the requests stream: which tenant is on which, and how their number changes.

A tenant is on one shard, so that its requests keep their order. While the number changes, requests
of a tenant that moves wait on its new shard until its old one is drained; the others go on.
`docs/redis.md` states the rule, `bus/redis/requests.py` keeps it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import msgspec

READERS = 8
"""Lanes that wait at each shard, about. Redis looks at all readers that wait at a stream whenever
an entry arrives: 1,000 of them make each entry cost 2 to 6 ms (docs/scale.md)."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of a deployment, and the last change of their number.

    Attributes:
        shards: Number that tenants hash to.
        streams: Number of streams that may hold entries, at least `shards` and `before`.
        changes: Number of changes until now.
        before: Number of shards before the last change; 0 if there was none.
        moving: Whether the last change is in progress.
        ends: The last change's old entries: for each shard that tenants left, the last entry that
            it may have of them; empty until all publishers have read the change.
        starts: For each shard that was ever added, the last entry that its results stream had then.
    """

    shards: int = 1
    streams: int = 1
    changes: int = 0
    before: int = 0
    moving: bool = False
    ends: dict[int, str] = {}
    starts: dict[int, str] = {}

    @property
    def is_announced(self) -> bool:
        """Whether publishers may not have read the change in progress yet."""
        return self.moving and not self.ends

    def left(self) -> range:
        """Return the shards that tenants left in the last change.

        To add shards moves tenants to the added ones only; to remove shards moves only those of the
        removed ones.
        """
        if self.shards > self.before:
            return range(self.before)
        return range(self.shards, self.before)

    def moved(self, tenant: str) -> bool:
        """Return whether the last change moved a tenant."""
        return bool(self.before) and (
            shard_of(tenant, self.before) != shard_of(tenant, self.shards)
        )

    def moved_to(self, tenant: str, shard: int) -> bool:
        """Return whether the last change moved a tenant to this shard."""
        return self.moved(tenant) and shard_of(tenant, self.shards) == shard

    def changed(self, shards: int, streams: int, starts: dict[int, str]) -> Layout:
        """Return the layout that begins a change.

        Args:
            shards: The new number.
            streams: Number that hold entries now.
            starts: First entries of the added shards.
        """
        return Layout(
            shards=shards,
            streams=max(shards, self.shards, streams),
            changes=self.changes + 1,
            before=self.shards,
            moving=True,
            starts=self.starts | starts,
        )

    def known_to_all(self, ends: dict[int, str]) -> Layout:
        """Return the layout once no process publishes by the one before the change."""
        return msgspec.structs.replace(self, ends=ends)

    def settled(self) -> Layout:
        """Return the layout once the shards that tenants left are drained."""
        return msgspec.structs.replace(self, moving=False)


@lru_cache(16_384)
def shard_of(tenant: str, shards: int) -> int:
    """Return a tenant's shard: rendezvous hashing, by SHA-1 of `<shard>:<tenant>`.

    A change of `n` shards to `m` moves a share of 1 - min(n, m) / max(n, m) of the tenants, the
    least possible.
    """
    return max(range(shards), key=lambda shard: _weight(tenant, shard)) if shards > 1 else 0


@lru_cache(64)
def homes_of(lane: str, shards: int, lanes: int) -> tuple[int, ...]:
    """Return the shards at which a lane waits for entries; it looks at others now and then.

    Lanes need not agree, and don't communicate: each shard has about `READERS` of them.

    Args:
        lane: The lane.
        shards: Number of shards.
        lanes: Number of lanes, roughly.
    """
    most = max(1, -(-READERS * shards // max(1, lanes)))
    ranked = sorted(range(shards), key=lambda shard: _weight(lane, shard), reverse=True)
    return tuple(ranked[:most])


def _weight(name: str, shard: int) -> bytes:
    return hashlib.sha1(f"{shard}:{name}".encode("utf-8", "surrogatepass")).digest()
