"""The stream of KV events in memory."""

from __future__ import annotations

from collections import deque

from ...config.errors import bus_closed
from ..kv_events import Continuity, KVEventEntry
from .broadcast import Broadcast, Tail


class MemoryKVEvents:
    """`KVEventStream` within one event loop."""

    def __init__(self, maxlen: int) -> None:
        self._kept: deque[KVEventEntry] = deque(maxlen=maxlen)
        self._readers = Broadcast[KVEventEntry](maxlen)

    async def publish(self, entry: KVEventEntry) -> bool:
        self._check_open()
        self._kept.append(entry)
        self._readers.push(entry)
        return True

    async def follow(self, *, kept: bool = False) -> Tail[KVEventEntry]:
        self._check_open()
        return Tail(self._readers, self._kept if kept else (), Continuity().check)

    def close(self) -> None:
        """End all readers once they have read the remaining entries."""
        self._readers.close()

    def _check_open(self) -> None:
        if self._readers.closed:
            raise bus_closed()
