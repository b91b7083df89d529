"""The least of many, where what they are ordered by changes."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

LEFTOVERS_KEPT = 64
"""Entries that no longer count and may be left in a heap, besides as many as count."""


class Keyed(Protocol):
    """What can be ordered.

    Attributes:
        version: Names the one entry of the item that counts; 0 while it is not in.
    """

    version: int

    @property
    def key(self) -> float:
        """What it is ordered by now; the least comes first."""


T = TypeVar("T", bound=Keyed)


class LeastFirst(Generic[T]):
    """Items by a key that may change while they are in; those with equal keys take turns.

    That a key has grown is noticed when its entry comes up, so growing costs nothing. A key that
    has fallen must be told (`put` again). All in O(log n), whatever is charged between two looks.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._versions = count(1)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, item: T) -> None:
        """Adds an item, or tells that its key has fallen."""
        self._size += not item.version
        item.version = next(self._versions)
        heapq.heappush(self._heap, (item.key, item.version, item))
        if len(self._heap) > 2 * self._size + LEFTOVERS_KEPT:
            self._heap = [entry for entry in self._heap if entry[2].version == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Takes an item out; one that is not in is out already."""
        self._size -= bool(item.version)
        item.version = 0

    def first(self) -> T | None:
        """The item with the least key; None when there is none."""
        heap = self._heap
        while heap:
            key, version, item = heap[0]
            if item.version != version:
                heapq.heappop(heap)
            elif item.key > key:
                item.version = next(self._versions)
                heapq.heapreplace(heap, (item.key, item.version, item))
            else:
                return item
        return None

    def least(self, number: int, margin: float) -> list[T]:
        """Up to `number` items with the least keys, none further from the least than `margin`."""
        items: list[T] = []
        while len(items) < number and (item := self.first()) is not None:
            if items and item.key > items[0].key + margin:
                break
            heapq.heappop(self._heap)
            items.append(item)
        for item in items:
            heapq.heappush(self._heap, (item.key, item.version, item))
        return items
