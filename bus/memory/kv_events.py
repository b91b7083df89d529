"""The stream of KV events in memory: a ring that its readers share."""

from __future__ import annotations

from collections import deque
from typing import Self

from ...config.errors import bus_closed
from ..kv_events import Continuity, KVEventEntry
from .results import Signal


class MemoryKVEvents:
    """`KVEventStream` within one event loop."""

    def __init__(self, maxlen: int) -> None:
        self.entries: deque[KVEventEntry] = deque(maxlen=maxlen)
        self.changed = Signal()
        self.appended = 0
        self.closed = False

    async def publish(self, entry: KVEventEntry) -> bool:
        if self.closed:
            raise bus_closed()
        self.entries.append(entry)
        self.appended += 1
        self.changed.notify()
        return True

    async def follow(self, *, kept: bool = False) -> _Follow:
        if self.closed:
            raise bus_closed()
        return _Follow(self, 0 if kept else self.appended)

    def close(self) -> None:
        """End all readers once they have read the remaining entries."""
        self.closed = True
        self.changed.notify()


class _Follow:
    """A reader, at the number of an entry."""

    def __init__(self, stream: MemoryKVEvents, position: int) -> None:
        self._stream = stream
        self._position = position
        self._continuity = Continuity()
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KVEventEntry:
        stream = self._stream
        while not self._done:
            if self._position == stream.appended:
                if stream.closed:
                    raise bus_closed()
                await stream.changed.wait()
                continue
            first = stream.appended - len(stream.entries)
            self._position = max(self._position, first)
            entry = stream.entries[self._position - first]
            self._position += 1
            if (checked := self._continuity.check(entry)) is not None:
                return checked
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._done = True
        self._stream.changed.notify()
