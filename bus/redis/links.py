"""Links between stages over Redis: one stream for each, one reader, writers in any process.

A writer may write a batch twice when the reply got lost; the reader drops what it has seen. The
reader removes what it has read, so a stream is about as long as its backlog, and writers look at
that length to know when to hold back.
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
from ..codec import decode_envelope, encode_envelope
from ..control import ServerRestarted
from ..links import CONTROL, Link
from ..memory.bus import MemoryInbox, Numbering
from ..messages import Envelope, Message
from ..queue import BoundedQueue

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message between two stages."""

WRITE_BATCH = 64
READ_BATCH = 256
READ_BLOCK_S = 5.0
CHECK_CLUSTER_S = 1.0
"""In a cluster, how often it is looked whether all servers are those that they were."""

TRIM_EVERY = 256
"""Entries that a reader reads at most before it removes them from the stream."""

REMEMBERED_SENDERS = 4096

UNREAD_CONTROL = 65_536
"""Messages kept on a control link that nobody reads; the oldest go."""


# All of a batch or nothing: were a part of it refused and what follows accepted, the reader would
# take the repetition of that part for something it has seen.
_SEND = """
for i = 2, #ARGV do
  redis.call('XADD', KEYS[1], '*', 'w', ARGV[1], 'm', ARGV[i])
end
return redis.call('XLEN', KEYS[1])
"""


class BatchWriter(Generic[T]):
    """A queue and the one task that writes it out, several items at a time, in order."""

    def __init__(
        self,
        name: str,
        write: Callable[[list[T]], Awaitable[int]],
        tells_refusals: bool = False,
    ) -> None:
        """`write` takes a batch and returns how many items the next batch may have.

        With `tells_refusals` a batch that the user has no right to write is dropped, and `flush`
        says so; without, it is tried again for as long as it takes.
        """
        self._name = name
        self._write = write
        self._tells_refusals = tells_refusals
        # Why the last batch was not written.
        self._refusal: BusError | None = None
        self._queue: BoundedQueue[T] = BoundedQueue(name)
        self._written = 0
        self._flushing: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._task = watched(self._run(), name, self._queue.close)

    async def put(self, item: T, capacity: int | None) -> None:
        """Appends an item; waits while there are `capacity` of them. Raises ChannelClosed."""
        await self._queue.put(item, capacity=capacity)

    async def flush(self) -> None:
        """Waits until all that was put so far is written.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: It may not be written; only with `tells_refusals`.
        """
        if self._written < self._queue.entered:
            if self._task.done():
                raise bus_closed()
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushing.append((self._queue.entered, written))
            await written
        if self._refusal is not None:
            raise self._refusal

    async def aclose(self, patience_s: float) -> None:
        """Writes what is there, within a time limit."""
        self._queue.close()
        await asyncio.wait({self._task}, timeout=patience_s)
        await end_tasks({self._task})
        lost = self._queue.entered - self._written
        if lost:
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
        """Writes until it succeeds: what a server refuses today may be allowed tomorrow."""
        backoff = Backoff(first_s=1.0, longest_s=30.0)
        while True:
            try:
                room = await self._write(batch)
            except BusError as error:
                get_logger().error("bus.write_refused", writer=self._name, error=error.message)
                if self._tells_refusals and error.code == NOT_PERMITTED:
                    self._refusal = error
                    return 1
                await backoff.wait()
            else:
                self._refusal = None
                return room


class LinkWriter:
    """Writes one link for all of its senders in this process."""

    def __init__(
        self, server: Server, redis: Redis, key: bytes, link: Link, nonce: bytes, capacity: int
    ) -> None:
        self._server = server
        self._redis = redis
        self._key = key
        self._name = f"link {link.name}"
        self._nonce = nonce
        self._capacity = None if link.closes_circle else capacity
        # Clients write to control links, too: perhaps of a pipeline that is not there to read
        # them, perhaps without the right to do so.
        self._keep = UNREAD_CONTROL if link.name.startswith("control.") else 0
        self._hold = Backoff(first_s=0.002, longest_s=0.05)
        self._length = 0
        self._writer: BatchWriter[bytes] = BatchWriter(
            self._name, self._write, tells_refusals=bool(self._keep)
        )

    async def put(self, payload: bytes) -> None:
        await self._writer.put(payload, self._capacity)

    async def flush(self) -> None:
        await self._writer.flush()

    async def aclose(self, patience_s: float) -> None:
        await self._writer.aclose(patience_s)

    async def _write(self, payloads: list[bytes]) -> int:
        if self._keep:
            await self._write_control(payloads)
            return WRITE_BATCH
        await self._wait_for_room()
        for some in within_bytes(payloads, MAX_MESSAGE_BYTES):

            async def attempt(some: Sequence[bytes] = some) -> int:
                command = ("EVAL", _SEND, 1, self._key, self._nonce, *some)
                return int(await execute(self._redis, *command))

            self._length = await persist(self._server, self._name, attempt)
        if self._capacity is None:
            return WRITE_BATCH
        return max(1, min(WRITE_BATCH, self._capacity - self._length))

    async def _write_control(self, payloads: list[bytes]) -> None:
        """One message after the other, and no script: a client needs no right to run those."""

        async def attempt(payload: bytes) -> None:
            fields = (WRITER, self._nonce, MESSAGE, payload)
            command = ("XADD", self._key, "MAXLEN", "~", self._keep, "*", *fields)
            await execute(self._redis, *command)

        for payload in payloads:
            await persist(self._server, self._name, partial(attempt, payload))

    async def _wait_for_room(self) -> None:
        """Holds back while the stream, as last seen, has no room."""
        if self._capacity is None:
            return
        self._hold.reset()
        while self._length >= self._capacity:
            self._length = int(
                await persist(
                    self._server,
                    self._name,
                    lambda: execute(self._redis, "XLEN", self._key),
                )
            )
            if self._length >= self._capacity:
                await self._hold.wait()


def within_bytes(payloads: Sequence[bytes], most_bytes: int) -> Iterator[list[bytes]]:
    """Cuts a batch where it gets too large: a server ends the connection of whoever sends more in
    one command than it keeps for a client (`client-query-buffer-limit`), each time again."""
    some: list[bytes] = []
    size = 0
    for payload in payloads:
        if some and size + len(payload) > most_bytes:
            yield some
            some, size = [], 0
        some.append(payload)
        size += len(payload)
    yield some


class RedisSender:
    """The `Sender` of a link that goes over Redis."""

    def __init__(
        self, writer: Callable[[Link], LinkWriter], numbering: Numbering, link: Link, sender: str
    ) -> None:
        self._writer = writer
        self._numbering = numbering
        self._link = link
        self._sender = sender

    async def send(
        self,
        body: Message,
        *,
        epoch: int = 0,
        traceparent: str = "",
        tracestate: str = "",
        budget_ns: int | None = None,
        operation_id: str = "",
    ) -> None:
        writer = self._writer(self._link)
        envelope = Envelope(
            body,
            epoch,
            self._sender,
            self._numbering.next(self._link.name, self._sender),
            time.time_ns(),
            traceparent,
            tracestate,
            budget_ns,
            operation_id,
        )
        payload = encode_envelope(envelope)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise BusError(
                f"a message of {len(payload)} bytes on the link {self._link.name} is larger than "
                f"{MAX_MESSAGE_BYTES}; send smaller batches",
                code="message_too_large",
            )
        await writer.put(payload)

    async def flush(self) -> None:
        await self._writer(self._link).flush()


class Seen:
    """The last message of each sender on each link, to drop what a writer wrote twice."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, bytes, str], int] = OrderedDict()

    def is_new(self, link: str, writer: bytes, envelope: Envelope) -> bool:
        """Notes the message. Those without an id are always new."""
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
    """Reads all links of one inbox that come over Redis, with one command at a time."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        links: Sequence[Link],
        inbox: MemoryInbox,
        seen: Seen,
        capacity: int,
    ) -> None:
        self._server = server
        self._block_s = CHECK_CLUSTER_S if server.is_cluster else READ_BLOCK_S
        self._redis = server.client(1, self._block_s)
        self._links = {keys.link(link.name): link for link in links}
        self._inbox = inbox
        self._seen = seen
        self._batch = min(READ_BATCH, capacity)
        self._trim_every = max(1, min(TRIM_EVERY, capacity // 4))
        # Whoever keeps the ledger is told when the server is another, or the same one restarted.
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
        """Fixes where to start: behind what is in the streams now, which is removed.

        May be repeated after an error of Redis.
        """
        looks = [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in self._links]
        tails = await execute_all(self._redis, looks)
        for key, tail in zip(self._links, tails, strict=True):
            self._positions[key] = tail[0][0] if tail else b"0-0"
        self._run_ids = await self._read_run_ids()
        await self._trim(self._positions)
        if self._closed:
            # Meanwhile; nobody would end what is begun now.
            await self._redis.aclose()
            return
        self._task = watched(self._run(), self._name, self._inbox.close)

    async def aclose(self) -> None:
        """Also while it starts."""
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
            get_logger().error("bus.read_refused", reader=self._name, error=error.message)
            await asyncio.sleep(1.0)

    async def _read(self) -> dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]:
        # The connection broke, perhaps because the server ended. In a cluster that may be another
        # server than the one which this connection goes to.
        due = self._checks_often and time.monotonic() >= self._compared_s + CHECK_CLUSTER_S
        if self._compare or due:
            await self._compare_run_ids()
        try:
            return await read(self._redis, self._positions, self._batch, self._block_s)
        except (exceptions.RedisError, OSError):
            self._compare = True
            raise

    async def _compare_run_ids(self) -> None:
        """Behind a broken connection there may be another server, which has not all messages."""
        run_ids = await self._read_run_ids()
        if self._ledger_link is not None and not self._run_ids <= run_ids:
            await self._inbox.put(self._ledger_link, Envelope(ServerRestarted()))
        self._run_ids, self._compare = run_ids, False

    async def _read_run_ids(self) -> frozenset[str]:
        """What names each run of each server that has a part of the data."""
        if self._ledger_link is None:
            return frozenset()
        infos = await on_each(self._redis, "INFO", "server")
        self._compared_s = time.monotonic()
        return frozenset(str(info.get("run_id")) for info in infos)

    async def _put(self, key: bytes, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        link = self._links[key]
        envelope = self._decode(link, entry_id, fields)
        if envelope is not None:
            await self._inbox.put(link, envelope)
        self._positions[key] = entry_id
        self._untrimmed[key] = self._untrimmed.get(key, 0) + 1

    def _decode(self, link: Link, entry_id: bytes, fields: dict[bytes, bytes]) -> Envelope | None:
        try:
            envelope = decode_envelope(fields[MESSAGE])
        except (KeyError, ValueError, RecursionError) as error:
            get_logger().warning(
                "bus.undecodable_entry",
                link=link.name,
                entry_id=entry_id.decode(),
                error=f"{type(error).__name__}: {error}",
            )
            return None
        if not self._seen.is_new(link.name, fields.get(WRITER, b""), envelope):
            return None
        return envelope

    async def _trim(self, positions: dict[bytes, bytes]) -> None:
        """Removes all entries up to these positions from their streams."""
        trims = []
        for key, entry_id in positions.items():
            trims.append(("XTRIM", key, "MINID", "=", id_after(entry_id)))
            self._untrimmed.pop(key, None)
        await execute_all(self._redis, trims)


async def read(
    redis: Redis, positions: dict[bytes, bytes], count: int, block_s: float
) -> dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]:
    """XREAD: the entries behind each position, by stream; waits up to `block_s` for the first.

    In a cluster all streams have to be in one slot.
    """
    arguments: list[Any] = ["COUNT", count, "BLOCK", int(block_s * 1000), "STREAMS"]
    first = next(iter(positions))
    reply = await execute(redis, "XREAD", *arguments, *positions, *positions.values(), key=first)
    return reply or {}
