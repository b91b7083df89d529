"""A queue with several producers, each optionally bounded.

Used for inboxes, the requests queue in memory, and writers' queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ..config import ChannelClosed

T = TypeVar("T")


class _Producer(Generic[T]):
    """One producer: the number of its items in the queue, and the waiting puts."""

    __slots__ = ("capacity", "inside", "waiting")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.inside = 0
        self.waiting: deque[tuple[asyncio.Future[None], T]] = deque()

    def has_room(self) -> bool:
        return self.capacity is None or self.inside < self.capacity


class BoundedQueue(Generic[T]):
    """Items in order of arrival, for one event loop.

    A put waits while its own producer is full; waiting puts keep their order. Taking items
    atomically admits waiting puts, so none is overtaken. Cancelling a wait on either side leaves
    the queue unchanged, or the item inside.

    Attributes:
        entered: Number of items added so far.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: deque[tuple[_Producer[T], T]] = deque()
        self._producers: dict[str, _Producer[T]] = {}
        self._takers: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self.entered = 0

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T, producer: str = "", capacity: int | None = None) -> None:
        """Append an item through `producer`, which holds `capacity` items (None: unlimited).

        Raises:
            ChannelClosed: The queue was closed.
        """
        if self._closed:
            raise self._closed_error()
        own = self._producers.get(producer)
        if own is None:
            own = self._producers[producer] = _Producer(capacity)
        if not own.waiting and own.has_room():
            self._append(own, item)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, item)
        own.waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled() and place in own.waiting:
                own.waiting.remove(place)
            raise

    async def take(self, max_items: int) -> list[T]:
        """Wait for items and return the oldest, at most `max_items`.

        Raises:
            ChannelClosed: The queue was closed and is empty.
        """
        while not self._items:
            if self._closed:
                raise self._closed_error()
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(woken)
            try:
                await woken
            except asyncio.CancelledError:
                if not woken.cancelled():  # woken and cancelled at once: pass it on
                    self._wake()
                raise
        taken: list[T] = []
        while self._items and len(taken) < max_items:
            producer, item = self._items.popleft()
            producer.inside -= 1
            taken.append(item)
            if producer.waiting:
                self._admit(producer)
        if self._items and self._takers:
            self._wake()
        return taken

    def close(self) -> None:
        """Refuse further items; those inside can still be taken. Waiting puts raise."""
        self._closed = True
        for producer in self._producers.values():
            while producer.waiting:
                turn, _ = producer.waiting.popleft()
                if not turn.done():
                    turn.set_exception(self._closed_error())
        while self._takers:
            self._wake()

    def move_waiting_to(self, other: BoundedQueue[T]) -> None:
        """Move waiting puts to the same producers of another queue."""
        for name, own in self._producers.items():
            producer = other._producers.setdefault(name, _Producer(own.capacity))
            producer.waiting.extend(own.waiting)
            own.waiting.clear()
            other._admit(producer)

    def _append(self, producer: _Producer[T], item: T) -> None:
        producer.inside += 1
        self.entered += 1
        self._items.append((producer, item))
        if self._takers:
            self._wake()

    def _admit(self, producer: _Producer[T]) -> None:
        while producer.waiting and producer.has_room():
            turn, item = producer.waiting.popleft()
            if not turn.done():  # done: its owner was cancelled
                turn.set_result(None)
                self._append(producer, item)

    def _wake(self) -> None:
        while self._takers:
            woken = self._takers.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"{self._name} was closed")
