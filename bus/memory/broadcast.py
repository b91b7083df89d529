"""Items in memory for any number of readers."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Self, TypeVar

from ...config.errors import bus_closed

T = TypeVar("T")


class Signal:
    """Wakes all waiters of a change."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """Return a future that the next change completes."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def notify(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


class Broadcast(Generic[T]):
    """Sends each item to all present readers."""

    def __init__(self, buffered: int) -> None:
        """`buffered`: items kept for a slow reader; older ones are dropped."""
        self.buffered = buffered
        self.tails: weakref.WeakSet[Tail[T]] = weakref.WeakSet()
        self.closed = False

    def push(self, item: T) -> None:
        for tail in self.tails:
            tail.push(item)

    def close(self) -> None:
        """End all readers once they have read the remaining items."""
        self.closed = True
        for tail in self.tails:
            tail.changed.notify()


class Tail(Generic[T]):
    """A reader of a broadcast's items from now on."""

    def __init__(
        self,
        source: Broadcast[T],
        items: Iterable[T] = (),
        read: Callable[[T], T | None] = lambda item: item,
    ) -> None:
        """Args:
        source: The broadcast.
        items: Items to begin with.
        read: Returns each item as it is to be read; None to skip it.
        """
        self._source = source
        self._items = deque(items, source.buffered)
        self._read = read
        self._done = False
        self.changed = Signal()
        source.tails.add(self)

    def push(self, item: T) -> None:
        self._items.append(item)
        self.changed.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._done:
            if self._items:
                if (item := self._read(self._items.popleft())) is not None:
                    return item
            elif self._source.closed:
                raise bus_closed()
            else:
                await self.changed.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._done = True
        self._source.tails.discard(self)
        self.changed.notify()
