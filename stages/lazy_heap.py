"""A heap whose items are removed lazily."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

LEFTOVERS_KEPT = 64
"""Dead entries that may stay in a heap, besides as many as it had when it was last compacted."""

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Items by key, the smallest first; equal keys in order of arrival.

    An item isn't removed when it ends: its entry is dropped when it comes up, or when dead entries
    outnumber the living. So each operation takes O(log n), amortised.
    """

    def __init__(self, is_alive: Callable[[int, T], bool]) -> None:
        """Args: whether an entry, given its number and its item, still counts."""
        self._is_alive = is_alive
        self._entries: list[tuple[Any, int, T]] = []
        self._numbers = count(1)
        self._compact_at = LEFTOVERS_KEPT

    def alive(self) -> Iterator[tuple[Any, int, T]]:
        """Yield (key, number, item) of all living entries, in no order."""
        return (entry for entry in self._entries if self._is_alive(*entry[1:]))

    def push(self, key: Any, item: T, number: int = 0) -> int:
        """Add an item; return the number of its entry. `number`: to put an entry back."""
        if len(self._entries) >= self._compact_at:
            self._entries = list(self.alive())
            heapq.heapify(self._entries)
            self._compact_at = 2 * len(self._entries) + LEFTOVERS_KEPT
        number = number or next(self._numbers)
        heapq.heappush(self._entries, (key, number, item))
        return number

    def first(self) -> tuple[Any, T] | None:
        """Return (key, item) of the first living entry; None if there is none."""
        while self._entries:
            key, number, item = self._entries[0]
            if self._is_alive(number, item):
                return key, item
            heapq.heappop(self._entries)
        return None

    def first_key(self) -> Any | None:
        """Return the least key of a living entry; None if there is none."""
        first = self.first()
        return None if first is None else first[0]

    def pop(self) -> None:
        """Remove the entry that `first` has returned."""
        heapq.heappop(self._entries)

    def pop_until(self, key: Any) -> Iterator[T]:
        """Remove and yield the items whose keys are at most `key`."""
        while (first := self.first()) is not None and first[0] <= key:
            self.pop()
            yield first[1]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
