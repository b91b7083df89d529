"""The stream of KV events on Redis: trimmed, and written without waiting."""

from __future__ import annotations

from typing import Any

from ...config import BusConfig
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ...store.records import readable
from ...store.redis.client import Commands, execute_all, persist
from ...store.redis.keys import Keys
from ..kv_events import Continuity, KVEventEntry, decode_batch, encode_batch
from .follow import Fields, RedisTail
from .links import WRITE_BATCH, BatchWriter
from .readers import Readers, readers_of

MOST_UNWRITTEN = 1024
"""Entries that wait while Redis is slow or unreachable; later ones are dropped."""


class RedisKVEvents:
    """`KVEventStream` on Redis."""

    def __init__(self, config: BusConfig, keys: Keys, commands: Commands) -> None:
        self._maxlen = config.kv_events_maxlen
        self._keys = keys
        self._commands = commands
        # Both are made on first use: few processes publish, and few read.
        self._writer: BatchWriter[KVEventEntry] | None = None
        self._readers: Readers | None = None
        self._dropping = self._closed = False

    async def publish(self, entry: KVEventEntry) -> bool:
        if self._closed:
            raise bus_closed()
        if self._writer is None:
            self._writer = BatchWriter("kv events", self._write)
        is_full = self._writer.unwritten >= MOST_UNWRITTEN
        if is_full and not self._dropping:
            get_logger().warning("bus.kv_events_dropped", unwritten=MOST_UNWRITTEN)
        self._dropping = is_full
        if not is_full:
            await self._writer.put(entry)
        return not is_full

    async def follow(self, *, kept: bool = False) -> RedisTail[KVEventEntry]:
        if self._closed:
            raise bus_closed()
        key, start = self._keys.kv_events, b"0-0"
        if not kept:
            last = await self._commands.retry("kv events", "XREVRANGE", key, "+", "-", "COUNT", 1)
            start = last[0][0] if last else start
        if self._readers is None:
            self._readers = readers_of(self._keys, self._commands)
        continuity, model = Continuity(), self._keys.model

        def read(fields: Fields) -> KVEventEntry | None:
            # None for a foreign entry.
            entry = readable(lambda _: _entry_of(fields), b"", "kv_events")
            if entry is None or model not in ("", entry.model):
                return None
            return continuity.check(entry)

        return RedisTail(self._readers.subscribe({key: start}), read)

    async def aclose(self, patience_s: float) -> None:
        """Write the remaining entries, within a time limit, and end all readers."""
        self._closed = True
        if self._readers is not None:
            await self._readers.aclose()
        if self._writer is not None:
            await self._writer.aclose(patience_s)

    async def _write(self, entries: list[KVEventEntry]) -> int:
        """Append entries. After a lost reply they may be there twice; readers drop duplicates."""
        commands: list[tuple[Any, ...]] = [
            ("XADD", self._keys.kv_events, "MAXLEN", "~", self._maxlen, "*", *_fields_of(entry))
            for entry in entries
        ]
        redis, server = self._commands.redis, self._commands.server
        await persist(server, "kv events", lambda: execute_all(redis, commands))
        return WRITE_BATCH


def _fields_of(entry: KVEventEntry) -> list[Any]:
    return [
        *("model", entry.model, "lane", entry.lane, "replica", entry.replica),
        *("incarnation", entry.incarnation, "sequence", entry.sequence),
        *("batch", encode_batch(entry.batch)),
    ]


def _entry_of(fields: Fields) -> KVEventEntry:
    """Decode an entry. Raises ValueError: a field is missing or unreadable."""

    def text(name: bytes) -> str:
        if name not in fields:
            raise ValueError(f"an entry of KV events has no field {name.decode()!r}")
        return fields[name].decode()

    return KVEventEntry(
        text(b"model"),
        text(b"lane"),
        int(text(b"replica")),
        text(b"incarnation"),
        int(text(b"sequence")),
        decode_batch(fields.get(b"batch", b"")),
    )
