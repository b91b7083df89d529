"""Policies that choose which block leaves a full KV tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Set

NOTHING_PINNED: Set[bytes] = frozenset()


class EvictionPolicy(ABC):
    """The blocks of one tier, by name, and the order in which they are evicted."""

    @abstractmethod
    def add(self, name: bytes) -> None:
        """Add a new block."""

    @abstractmethod
    def hit(self, name: bytes) -> None:
        """Record a use of a block."""

    @abstractmethod
    def remove(self, name: bytes) -> None:
        """Remove a block, if it is there."""

    @abstractmethod
    def evict(self, pinned: Set[bytes] = NOTHING_PINNED) -> bytes | None:
        """Remove and return the next block that is not pinned; None if there is none."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the block whose last use is longest ago."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes) -> None:
        self._order[name] = None

    def hit(self, name: bytes) -> None:
        self._order.move_to_end(name)

    def remove(self, name: bytes) -> None:
        self._order.pop(name, None)

    def evict(self, pinned: Set[bytes] = NOTHING_PINNED) -> bytes | None:
        found = next((name for name in self._order if name not in pinned), None)
        if found is not None:
            del self._order[found]
        return found

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        self._order.clear()


class Clock(EvictionPolicy):
    """Second chance: a block that was used since the hand passed it stays for another round."""

    def __init__(self, capacity: int) -> None:
        # The hand is at the front; the value is whether the block was used.
        self._ring: OrderedDict[bytes, bool] = OrderedDict()

    def add(self, name: bytes) -> None:
        self._ring[name] = False

    def hit(self, name: bytes) -> None:
        self._ring[name] = True

    def remove(self, name: bytes) -> None:
        self._ring.pop(name, None)

    def evict(self, pinned: Set[bytes] = NOTHING_PINNED) -> bytes | None:
        # After one round no block counts as used, so the second round finds one that isn't pinned.
        for _ in range(2 * len(self._ring)):
            name, used = self._ring.popitem(last=False)
            if not used and name not in pinned:
                return name
            self._ring[name] = False
        return None

    def __len__(self) -> int:
        return len(self._ring)

    def clear(self) -> None:
        self._ring.clear()


class S3Fifo(EvictionPolicy):
    """Three queues: new blocks pass through a small one, and reach the main one if used there.

    A block that left the small queue unused is remembered by name, and goes straight to the main
    queue when it comes back. Blocks that are used once never displace the others.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    SMALL_SHARE = 0.1
    MOST_USES = 3

    def __init__(self, capacity: int) -> None:
        """`capacity`: the most blocks of the tier."""
        self._uses: dict[bytes, int] = {}
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._most_small = max(1, int(capacity * self.SMALL_SHARE))
        self._most_ghosts = capacity

    def add(self, name: bytes) -> None:
        self._uses[name] = 0
        known = name in self._ghosts
        self._ghosts.pop(name, None)
        (self._main if known else self._small)[name] = None

    def hit(self, name: bytes) -> None:
        self._uses[name] = min(self._uses[name] + 1, self.MOST_USES)

    def remove(self, name: bytes) -> None:
        if self._uses.pop(name, None) is not None:
            self._small.pop(name, None)
            self._main.pop(name, None)

    def evict(self, pinned: Set[bytes] = NOTHING_PINNED) -> bytes | None:
        # Each block moves at most `MOST_USES` + 2 times before it goes, or proves to be pinned.
        for _ in range((self.MOST_USES + 2) * len(self._uses)):
            from_small = len(self._small) >= self._most_small or not self._main
            queue = self._small if from_small else self._main
            name, _ = queue.popitem(last=False)
            if self._uses[name] or name in pinned:
                if not from_small:
                    self._uses[name] = max(self._uses[name] - 1, 0)
                self._main[name] = None
                continue
            del self._uses[name]
            if from_small:
                self._ghosts[name] = None
                if len(self._ghosts) > self._most_ghosts:
                    self._ghosts.popitem(last=False)
            return name
        return None

    def __len__(self) -> int:
        return len(self._uses)

    def clear(self) -> None:
        for each in (self._uses, self._small, self._main, self._ghosts):
            each.clear()


POLICIES: dict[str, type[LeastRecentlyUsed | Clock | S3Fifo]] = {
    "lru": LeastRecentlyUsed,
    "clock": Clock,
    "s3fifo": S3Fifo,
}
