"""Links between stages over Redis: one stream and one reader per link, writers in any process.

A writer may write a batch twice when a reply is lost; the reader drops duplicates. The reader
deletes read entries, so a stream's length is about its backlog, by which writers hold back.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from ...config import NOT_PERMITTED, BusError, ChannelClosed
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ...store.redis.client import (
    Backoff,
    Server,
    end_tasks,
    execute,
    execute_all,
    on_each,
    persist,
    watched,
)
from ...store.redis.keys import MESSAGE, WRITER, Keys, id_after
from ...store.redis.multiplexed import MultiplexedRedis
from ..codec import decode_envelope, encode_envelope
from ..control import ServerRestarted
from ..envelope import Envelope
from ..links import CONTROL, AnyLink
from ..memory.bus import MemoryInbox
from ..queue import BoundedQueue
from ..sender import Numbering, Sender
from .entries import Entries

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Size limit of one message between stages."""

WRITE_BATCH = 64
READ_BATCH = 256
READ_BLOCK_S = 5.0
CHECK_CLUSTER_S = 1.0
"""In a cluster, the interval at which the servers' run ids are compared."""

TRIM_EVERY = 256
"""Entries read before the reader deletes them from the stream."""

REMEMBERED_SENDERS = 4096

UNREAD_CONTROL = 65_536
"""Length limit of a control link without a reader; the oldest messages are dropped."""


# A batch is written atomically. If a part were refused and later messages accepted, the reader
# would drop the retry of that part as a duplicate.
_SEND = """
for i = 2, #ARGV do
  redis.call('XADD', KEYS[1], '*', 'w', ARGV[1], 'm', ARGV[i])
end
return redis.call('XLEN', KEYS[1])
"""


class BatchWriter(Generic[T]):
    """A queue drained in batches, in order, by one task."""

    def __init__(
        self,
        name: str,
        write: Callable[[list[T]], Awaitable[int]],
        capacity: int | None = None,
        tells_refusals: bool = False,
    ) -> None:
        """Args:
        write: Writes a batch; returns the size limit of the next batch.
        capacity: Items that may wait; None for any number.
        tells_refusals: Drop a batch that the user may not write, and raise from `flush`. False:
            retry it for as long as it takes.
        """
        self._name = name
        self._write = write
        self._capacity = capacity
        self._tells_refusals = tells_refusals
        # Error of the last batch, if it was dropped.
        self._refusal: BusError | None = None
        self._queue: BoundedQueue[T] = BoundedQueue(name)
        self._written = 0
        self._flushing: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._task = watched(self._run(), name, self._queue.close)

    def put(self, item: T) -> Awaitable[None]:
        """Append an item; wait while the queue is full. Raises ChannelClosed."""
        return self._queue.put(item, capacity=self._capacity)

    @property
    def unwritten(self) -> int:
        """Items that wait, or are being written."""
        return self._queue.entered - self._written

    async def flush(self) -> None:
        """Wait until all items put so far are written.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The user may not write them; only with `tells_refusals`.
        """
        if self.unwritten:
            if self._task.done():
                raise bus_closed()
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushing.append((self._queue.entered, written))
            await written
        if self._refusal is not None:
            raise self._refusal

    async def aclose(self, patience_s: float) -> None:
        """Write the remaining items, within a time limit."""
        self._queue.close()
        await asyncio.wait({self._task}, timeout=patience_s)
        await end_tasks({self._task})
        if lost := self.unwritten:
            get_logger().warning(
                "bus.closed_with_unsent_messages", writer=self._name, messages=lost
            )
        while self._flushing:
            _, written = self._flushing.popleft()
            if not written.done():
                written.set_exception(bus_closed())

    async def _run(self) -> None:
        room = 1
        while True:
            try:
                batch = await self._queue.take(room)
            except ChannelClosed:
                return
            room = await self._attempt(batch)
            self._written += len(batch)
            while self._flushing and self._flushing[0][0] <= self._written:
                _, written = self._flushing.popleft()
                if not written.done():
                    written.set_result(None)

    async def _attempt(self, batch: list[T]) -> int:
        """Write until it succeeds: an administrator may grant the missing right meanwhile."""
        backoff = Backoff(first_s=1.0, longest_s=30.0)
        while True:
            try:
                room = await self._write(batch)
            except BusError as error:
                get_logger().error("bus.write_refused", writer=self._name, error=str(error))
                if self._tells_refusals and error.code == NOT_PERMITTED:
                    self._refusal = error
                    return 1
                await backoff.wait()
            else:
                self._refusal = None
                return room


class LinkWriter(BatchWriter[bytes]):
    """Writer of one link for all of its senders in this process."""

    def __init__(
        self, server: Server, redis: Redis, key: bytes, link: AnyLink, nonce: bytes, capacity: int
    ) -> None:
        self._server = server
        self._redis = redis
        self._key = key
        self._nonce = nonce
        self._hold = Backoff(first_s=0.002, longest_s=0.05)
        self._length = 0
        # The reply to a message that was written at once.
        self._begun: asyncio.Future[list[Any]] | None = None
        # Clients write to control links too: possibly of a pipeline that isn't running, possibly
        # without the right to.
        is_control = link.name.startswith("control.")
        self._at_once: MultiplexedRedis | None = None
        if not is_control and isinstance(redis, MultiplexedRedis):
            self._at_once = redis
        super().__init__(
            f"link {link.name}",
            self._write_control if is_control else self._write_link,
            None if link.closes_circle else capacity,
            tells_refusals=is_control,
        )

    def put(self, item: bytes) -> Awaitable[None]:
        """Append an item; write it at once if there is no other."""
        if self._at_once is not None and not self.unwritten and self._has_room:
            self._begun = self._at_once.begin(self._sends([item]))
        return super().put(item)

    async def _write_link(self, payloads: list[bytes]) -> int:
        begun, self._begun = self._begun, None
        if begun is not None and await self._is_written(begun):
            payloads = payloads[1:]
        if payloads:
            await self._wait_for_room()
            for some in within_bytes(payloads, MAX_MESSAGE_BYTES):
                sends = partial(execute_all, self._redis, self._sends(some))
                self._length = int((await persist(self._server, self._name, sends))[-1])
        if self._capacity is None:
            return WRITE_BATCH
        return max(1, min(WRITE_BATCH, self._capacity - self._length))

    def _sends(self, payloads: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Return commands that append messages atomically; the last one returns the length."""
        if len(payloads) == 1:
            fields = (WRITER, self._nonce, MESSAGE, *payloads)
            return [("XADD", self._key, "*", *fields), ("XLEN", self._key)]
        return [("EVAL", _SEND, 1, self._key, self._nonce, *payloads)]

    async def _is_written(self, begun: asyncio.Future[list[Any]]) -> bool:
        """Return whether a message was written at once; if that is not certain, it is written
        again."""
        try:
            added, length = await begun
        except (exceptions.RedisError, OSError):
            return False
        if isinstance(added, Exception) or isinstance(length, Exception):
            return False
        self._length = int(length)
        return True

    async def _write_control(self, payloads: list[bytes]) -> int:
        """Write messages one by one, without a script: a client needs no right to run scripts."""
        for payload in payloads:
            fields = (WRITER, self._nonce, MESSAGE, payload)
            await self._persist("XADD", self._key, "MAXLEN", "~", UNREAD_CONTROL, "*", *fields)
        return WRITE_BATCH

    async def _persist(self, *command: Any) -> Any:
        return await persist(self._server, self._name, partial(execute, self._redis, *command))

    async def _wait_for_room(self) -> None:
        """Wait until the stream has room, by its last known length."""
        self._hold.reset()
        while not self._has_room:
            self._length = int(await self._persist("XLEN", self._key))
            if not self._has_room:
                await self._hold.wait()

    @property
    def _has_room(self) -> bool:
        return self._capacity is None or self._length < self._capacity


def within_bytes(payloads: Sequence[bytes], most_bytes: int) -> Iterator[list[bytes]]:
    """Split a batch by size: a server closes the connection of a client whose command exceeds
    `client-query-buffer-limit`, on every retry.
    """
    some: list[bytes] = []
    size = 0
    for payload in payloads:
        if some and size + len(payload) > most_bytes:
            yield some
            some, size = [], 0
        some.append(payload)
        size += len(payload)
    yield some


class RedisSender(Sender):
    """`Sender` of a link over Redis."""

    def __init__(
        self, writer: Callable[[], LinkWriter], numbering: Numbering, link: AnyLink, sender: str
    ) -> None:
        """Args: `writer` returns the link's writer, or raises ChannelClosed."""
        super().__init__(numbering, link, sender)
        self._writer = writer

    def _put(self, envelope: Envelope) -> Awaitable[None]:
        payload = encode_envelope(envelope)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise BusError(
                f"a message of {len(payload)} bytes on the link {self._link.name} is larger than "
                f"{MAX_MESSAGE_BYTES}; send smaller batches",
                code="message_too_large",
            )
        return self._writer().put(payload)

    async def flush(self) -> None:
        await self._writer().flush()


class Seen:
    """Last message id of each sender on each link, to drop duplicates."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, bytes, str], int] = OrderedDict()

    def is_new(self, link: str, writer: bytes, envelope: Envelope) -> bool:
        """Return whether a message is new, and record it. Messages without an id are always new."""
        if envelope.id <= 0:
            return True
        source = (link, writer, envelope.sender)
        if envelope.id <= self._last.get(source, 0):
            return False
        self._last[source] = envelope.id
        self._last.move_to_end(source)
        if len(self._last) > REMEMBERED_SENDERS:
            self._last.popitem(last=False)
        return True


class LinkReader:
    """Reader of all links of one inbox that come over Redis, with one blocking command."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        links: Sequence[AnyLink],
        inbox: MemoryInbox,
        seen: Seen,
        capacity: int,
    ) -> None:
        self._server = server
        self._block_s = CHECK_CLUSTER_S if server.is_cluster else READ_BLOCK_S
        self._redis = server.client(self._block_s, self._connected)
        self._links = {keys.link(link.name): link for link in links}
        self._inbox = inbox
        self._seen = seen
        self._batch = min(READ_BATCH, capacity)
        self._trim_every = max(1, min(TRIM_EVERY, capacity // 4))
        # Admission, which owns the ledger, is informed when the server restarted or was replaced.
        self._ledger_link = next((link for link in links if link == CONTROL["admission"]), None)
        self._checks_often = server.is_cluster and self._ledger_link is not None
        self._run_ids: frozenset[str] = frozenset()
        self._compare = False
        self._compared_s = 0.0
        self._positions: dict[bytes, bytes] = {}
        self._untrimmed: dict[bytes, int] = {}
        self._name = "links " + ", ".join(link.name for link in links)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Fix the start positions after the current entries, and delete those. May be repeated."""
        looks = [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in self._links]
        tails = await execute_all(self._redis, looks)
        for key, tail in zip(self._links, tails, strict=True):
            self._positions[key] = tail[0][0] if tail else b"0-0"
        self._run_ids = await self._read_run_ids()
        self._compare = False
        await self._trim(self._positions)
        if self._closed:
            # Closed meanwhile: start no task.
            await self._redis.aclose()
            return
        self._task = watched(self._run(), self._name, self._inbox.close)

    async def aclose(self) -> None:
        """Stop reading, also during `start`."""
        self._closed = True
        if self._task is not None:
            await end_tasks({self._task})
        await self._redis.aclose()

    async def _run(self) -> None:
        try:
            while True:
                await self._round()
        except ChannelClosed:
            return  # the inbox takes no more

    async def _round(self) -> None:
        try:
            reply = await persist(self._server, self._name, self._read)
            for key, entries in reply.items():
                for entry_id, fields in entries:
                    await self._put(key, entry_id, fields)
            await asyncio.sleep(0)  # the stage goes first
            due = {
                key: self._positions[key]
                for key, count in self._untrimmed.items()
                if count >= self._trim_every or not reply
            }
            if due:
                await persist(self._server, self._name, lambda: self._trim(due))
        except BusError as error:
            if isinstance(error, ChannelClosed):
                raise
            get_logger().error("bus.read_refused", reader=self._name, error=str(error))
            await asyncio.sleep(1.0)

    async def _read(self) -> dict[bytes, Entries]:
        # After a broken connection the server may have restarted. In a cluster it may be a server
        # other than the one of this connection.
        due = self._checks_often and time.monotonic() >= self._compared_s + CHECK_CLUSTER_S
        if self._compare or due:
            await self._compare_run_ids()
        try:
            return await read(self._redis, self._positions, self._batch, self._block_s)
        except (exceptions.RedisError, OSError):
            self._compare = True
            raise

    def _connected(self) -> None:
        """Note a new connection: the server may have restarted while this process stood still."""
        self._compare = True

    async def _compare_run_ids(self) -> None:
        """Report a changed server, which may lack messages."""
        run_ids = await self._read_run_ids()
        if self._ledger_link is not None and not self._run_ids <= run_ids:
            await self._inbox.put(self._ledger_link, Envelope(ServerRestarted()))
        self._run_ids, self._compare = run_ids, False

    async def _read_run_ids(self) -> frozenset[str]:
        """Return the run id of each server that holds part of the data."""
        if self._ledger_link is None:
            return frozenset()
        infos = await on_each(self._redis, "INFO", "server")
        self._compared_s = time.monotonic()
        return frozenset(str(info.get("run_id")) for info in infos)

    async def _put(self, key: bytes, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        link = self._links[key]
        try:
            envelope = decode_envelope(fields[MESSAGE])
        except (KeyError, ValueError, RecursionError) as error:
            get_logger().warning(
                "bus.undecodable_entry",
                link=link.name,
                entry_id=entry_id.decode(),
                error=f"{type(error).__name__}: {error}",
            )
        else:
            if self._seen.is_new(link.name, fields.get(WRITER, b""), envelope):
                await self._inbox.put(link, envelope)
        self._positions[key] = entry_id
        self._untrimmed[key] = self._untrimmed.get(key, 0) + 1

    async def _trim(self, positions: dict[bytes, bytes]) -> None:
        """Delete all entries up to these positions from their streams."""
        trims = []
        for key, entry_id in positions.items():
            trims.append(("XTRIM", key, "MINID", "=", id_after(entry_id)))
            self._untrimmed.pop(key, None)
        await execute_all(self._redis, trims)


async def read(
    redis: Redis, positions: dict[bytes, bytes], count: int, block_s: float
) -> dict[bytes, Entries]:
    """Run XREAD: return the entries after each position, by stream; wait up to `block_s`.

    In a cluster all streams must share one slot.
    """
    arguments: list[Any] = ["COUNT", count, "BLOCK", int(block_s * 1000), "STREAMS"]
    first = next(iter(positions))
    reply = await execute(redis, "XREAD", *arguments, *positions, *positions.values(), key=first)
    return reply or {}
