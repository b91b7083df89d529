"""The requests stream: a consumer group with one consumer, its entries kept until acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
from redis import exceptions
from redis.asyncio import Redis

from ..config import BusConfig
from .channel import Malformed, RequestEntry
from .codec import decode_request, encode_request
from .keys import JSON, MSGPACK, REFUSED, TRACEPARENT, TRACESTATE, Keys
from .line import bus_closed
from .messages import GenerateRequest
from .redis_client import Backoff, Commands, Server, end_tasks, execute, is_transient, log, persist
from .redis_links import BatchWriter

CONSUMER = "admission-0"
"""There is one admission, so its successor is the same consumer and finds what it had taken."""

TAKE_BLOCK_S = 5.0
DRAIN_PAGE = 256
ACK_BATCH = 256

_FIELDS = frozenset({JSON, MSGPACK, REFUSED, TRACEPARENT, TRACESTATE})
_BODIES = (JSON, MSGPACK, REFUSED)

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class RedisRequests:
    """See `RequestQueue`.

    Entries come from Redis in a task of their own, which a cancelled `take` leaves running: what
    Redis has handed out is kept here for the next one. Redis may hand out an entry again (after a
    broken connection, or when the group had to be made again), so those in hand are known by id.
    """

    def __init__(self, config: BusConfig, keys: Keys, server: Server, commands: Commands) -> None:
        self._config = config
        self._key = keys.requests
        self._server = server
        self._commands = commands
        self._redis: Redis = server.client(1, TAKE_BLOCK_S)
        self._ready: deque[RequestEntry] = deque()
        self._known: set[str] = set()
        self._fetching: asyncio.Task[None] | None = None
        # True while entries may be assigned to us that we have not got: at first, and after each
        # broken connection, whose last reply may have been lost.
        self._drain_first = True
        self._acks: BatchWriter[str] | None = None
        self._closed = False

    async def publish(
        self,
        request: GenerateRequest | dict[str, Any] | bytes,
        *,
        traceparent: str = "",
        tracestate: str = "",
    ) -> str:
        """See `RequestQueue.publish`."""
        field, body = encode_request(request)
        command: list[Any] = ["XADD", self._key, "*", field, body]
        for name, value in ((TRACEPARENT, traceparent), (TRACESTATE, tracestate)):
            if value:
                command += [name, value.encode("ascii", "ignore")]
        redis = self._commands.redis
        entry_id: bytes = await self._commands.once(lambda: execute(redis, *command))
        return entry_id.decode()

    async def pending(self) -> list[RequestEntry]:
        """See `RequestQueue.pending`."""
        if self._acks is not None:
            await self._acks.flush()
        self._drain_first = False  # before the drain: a fetch that breaks meanwhile sets it again
        try:
            raw = await self._commands.shielded(
                persist(self._server, "requests", lambda: self._drain(self._commands.redis))
            )
        except BaseException:
            self._drain_first = True
            raise
        entries = [self._read_entry(entry_id, fields) for entry_id, fields in raw]
        ids = {entry.entry_id for entry in entries}
        # A fetch under way may add what it gets meanwhile; it knows these by id and skips them.
        self._ready = deque(entry for entry in self._ready if entry.entry_id not in ids)
        self._known = ids | {entry.entry_id for entry in self._ready}
        return entries

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        """See `RequestQueue.take`.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: Redis refuses the command itself, for example for want of permission.
        """
        while not self._ready:
            if self._closed:
                raise bus_closed()
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch(max_items), name="requests")
            fetching = self._fetching
            await asyncio.wait({fetching})
            if self._fetching is fetching:
                self._fetching = None
            if not fetching.cancelled():
                fetching.result()
        return [self._ready.popleft() for _ in range(min(max_items, len(self._ready)))]

    async def acknowledge(self, entry_id: str) -> None:
        """See `RequestQueue.acknowledge`. Written within moments, together with others."""
        if self._closed:
            raise bus_closed()
        if entry_id not in self._known:
            return
        if self._acks is None:
            self._acks = BatchWriter("acknowledgements", self._write_acks)
        await self._acks.put(entry_id, None)

    async def aclose(self, patience_s: float) -> None:
        """Writes what was acknowledged. What was taken and not acknowledged stays ours."""
        self._closed = True
        if self._fetching is not None:
            await end_tasks({self._fetching})
        if self._acks is not None:
            await self._acks.aclose(patience_s)
        await self._redis.aclose()

    async def _write_acks(self, batch: list[str]) -> int:
        async def attempt() -> None:
            # Together: an entry acknowledged but not deleted would come back when the group is
            # made again.
            pipeline = self._commands.redis.pipeline(transaction=True)
            pipeline.execute_command("XACK", self._key, self._config.group, *batch)
            pipeline.execute_command("XDEL", self._key, *batch)
            await pipeline.execute()

        await persist(self._server, "acknowledgements", attempt)
        self._known.difference_update(batch)
        return ACK_BATCH

    async def _fetch(self, max_items: int) -> None:
        """Adds at least one entry to `_ready`."""
        backoff = Backoff()
        while not self._ready:
            try:
                if self._drain_first:
                    entries = await self._drain(self._redis)
                    self._drain_first = False
                else:
                    entries = await self._read_new(max_items)
            except (exceptions.RedisError, OSError) as error:
                if is_no_group(error):
                    await self._make_group()
                elif is_transient(error):
                    self._drain_first = True
                    log.warning("bus.retrying", what="requests", error=type(error).__name__)
                else:
                    raise self._server.explain(error) from None
                await backoff.wait()
                continue
            backoff.reset()
            for entry_id, fields in entries:
                if entry_id.decode() not in self._known:
                    entry = self._read_entry(entry_id, fields)
                    self._known.add(entry.entry_id)
                    self._ready.append(entry)

    async def _read_new(self, max_items: int) -> Entries:
        block_ms = int(TAKE_BLOCK_S * 1000)
        return await self._read_group(self._redis, ">", max_items, "BLOCK", block_ms)

    async def _drain(self, redis: Redis) -> Entries:
        """All entries that are assigned to us, oldest first; those deleted since are dropped."""
        found: Entries = []
        gone: list[bytes] = []
        cursor = "0"
        while True:
            try:
                page = await self._read_group(redis, cursor, DRAIN_PAGE)
            except exceptions.ResponseError as error:
                if is_no_group(error):
                    return []
                raise
            for entry_id, fields in page:
                if fields:
                    found.append((entry_id, fields))
                else:
                    gone.append(entry_id)
            if not page:
                break
            cursor = page[-1][0].decode()
        if gone:
            log.warning("bus.requests_deleted_while_pending", entries=len(gone))
            await execute(redis, "XACK", self._key, self._config.group, *gone)
        return found

    async def _read_group(self, redis: Redis, start: str, count: int, *block: Any) -> Entries:
        reply = await execute(
            redis,
            "XREADGROUP",
            *("GROUP", self._config.group, CONSUMER, "COUNT", count),
            *block,
            *("STREAMS", self._key, start),
        )
        entries: Entries = (reply or {}).get(self._key, [])
        return entries

    async def _make_group(self) -> None:
        """Makes the group, from the stream's beginning: nothing in it has been answered."""
        try:
            await execute(
                self._redis, "XGROUP", "CREATE", self._key, self._config.group, "0", "MKSTREAM"
            )
        except exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                log.warning("bus.group_not_made", error=str(error))
        except (exceptions.RedisError, OSError):
            self._drain_first = True

    def _read_entry(self, entry_id: bytes, fields: dict[bytes, bytes]) -> RequestEntry:
        return RequestEntry(
            entry_id.decode(),
            read_request(fields, self._config.max_request_bytes),
            fields.get(TRACEPARENT, b"").decode("ascii", "ignore"),
            fields.get(TRACESTATE, b"").decode("ascii", "ignore"),
        )


def read_request(fields: dict[bytes, bytes], max_bytes: int) -> GenerateRequest | Malformed:
    """The request in an entry's fields, whoever wrote them. Never raises."""
    unknown = sorted(set(fields) - _FIELDS)
    bodies = [name for name in _BODIES if name in fields]
    if unknown or len(bodies) != 1:
        return Malformed(
            "",
            "malformed",
            "an entry of the requests stream has one field 'json' or 'msgpack', and may have "
            f"'traceparent' and 'tracestate'; this one has {_names(fields)}",
        )
    body = fields[bodies[0]]
    if bodies[0] == REFUSED:
        try:
            return msgspec.json.decode(body, type=Malformed)
        except (ValueError, RecursionError):
            return Malformed("", "malformed", "the field 'refused' can't be read")
    return decode_request(body, "json" if bodies[0] == JSON else "msgpack", max_bytes)


def _names(fields: dict[bytes, bytes]) -> str:
    names = [repr(name[:40].decode("utf-8", "replace")) for name in sorted(fields)[:8]]
    return ", ".join(names) or "none"


def is_no_group(error: Exception) -> bool:
    return str(error).startswith("NOGROUP")
