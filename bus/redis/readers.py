"""Readers of streams for clients: one connection for all streams followed in this process.

In a cluster a command can read the streams of one slot only, so each followed stream has a
connection of its own.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from functools import partial

from redis import exceptions

from ...config import BusError
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ...store.redis.client import Commands, Server, end_tasks, execute_all, persist, watched
from ...store.redis.keys import Keys, parse_id
from .entries import Entries
from .links import read

FOLLOW_BLOCK_S = 2.0

PAGE = 128
BUFFERED = 512
"""Entries buffered for a slow reader before its streams are paused."""

WAKE_TTL_S = 60

Entry = tuple[bytes, bytes, dict[bytes, bytes]]
"""A stream's key, and the id and fields of one entry."""


class Readers(ABC):
    """Readers of the streams of subscriptions."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._redis = server.client(FOLLOW_BLOCK_S)
        self._closed = False

    def subscribe(self, positions: dict[bytes, bytes]) -> Subscription:
        """Follow streams, each after an entry id. Raises ChannelClosed."""
        if self._closed:
            raise bus_closed()
        subscription = Subscription(self, positions)
        self._add(subscription, positions)
        return subscription

    def extend(self, subscription: Subscription, positions: dict[bytes, bytes]) -> None:
        """Follow more streams, each after an entry id."""
        subscription.positions.update(positions)
        self._add(subscription, positions)

    @abstractmethod
    def _add(self, subscription: Subscription, keys: Iterable[bytes]) -> None:
        """Read these streams for a subscription from now on."""

    @abstractmethod
    def remove(self, key: bytes, subscription: Subscription) -> None:
        """Leave a stream. A running read may still name it; the next one doesn't."""

    @abstractmethod
    def wake(self, subscription: Subscription) -> None:
        """Read the streams of a subscription again, which has room for more."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop reading; waiting subscriptions raise ChannelClosed."""

    async def _read(self, positions: dict[bytes, bytes]) -> dict[bytes, Entries]:
        """Return entries after these positions; after a refusal none, a second later."""
        attempt = partial(read, self._redis, positions, PAGE, FOLLOW_BLOCK_S)
        try:
            return await persist(self._server, "results reader", attempt)
        except BusError as error:
            get_logger().error("bus.read_refused", reader="results", error=str(error))
            await asyncio.sleep(1.0)
            return {}


class Subscription:
    """Streams followed by one reader, with a buffer of entries.

    Attributes:
        positions: The last entry read from each stream.
    """

    def __init__(self, readers: Readers, positions: dict[bytes, bytes]) -> None:
        self._readers = readers
        self._queue: deque[Entry] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.positions = positions
        self.closed = False

    @property
    def wants_more(self) -> bool:
        return len(self._queue) < BUFFERED

    async def next(self) -> Entry:
        """Wait for the next entry of any stream. Raises ChannelClosed."""
        while not self._queue:
            if self.closed:
                raise bus_closed()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        was_full = not self.wants_more
        entry = self._queue.popleft()
        if was_full:
            self._readers.wake(self)
        return entry

    def push(self, key: bytes, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        """Buffer an entry, unless it was read before (for another reader that began later)."""
        if parse_id(entry_id) > parse_id(self.positions[key]):
            self.positions[key] = entry_id
            self._queue.append((key, entry_id, fields))
            self._notify()

    def keep_only(self, key: bytes) -> None:
        """Leave all streams but one."""
        for other in set(self.positions) - {key}:
            self._readers.remove(other, self)
            del self.positions[other]

    def close(self) -> None:
        """Leave all streams."""
        self.closed = True
        for key in self.positions:
            self._readers.remove(key, self)
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamReader(Readers):
    """`Readers` with one task and one blocking XREAD over all subscriptions.

    An entry on its own wake-up stream ends the wait, so that the next XREAD can name streams added
    meanwhile.
    """

    def __init__(self, keys: Keys, commands: Commands) -> None:
        super().__init__(commands.server)
        self._commands = commands
        self._subscriptions: dict[bytes, set[Subscription]] = {}
        # Where the next read starts, and the streams for which that is to be computed again.
        self._starts: dict[bytes, bytes] = {}
        self._changed_keys: dict[bytes, None] = {}
        self._wake_key = keys.wake(uuid.uuid4().hex)
        self._wake_position = b"0-0"
        self._changed = asyncio.Event()
        self._blocking = False
        self._waking: asyncio.Task[None] | None = None
        # Whether there was a reason to interrupt after the running interruption was sent.
        self._again = False
        self._task: asyncio.Task[None] | None = None

    def _add(self, subscription: Subscription, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._subscriptions.setdefault(key, set()).add(subscription)
            self._changed_keys[key] = None
        if self._task is None:
            self._task = watched(self._run(), "results reader", self._end_all)
        self._interrupt_read()

    def remove(self, key: bytes, subscription: Subscription) -> None:
        followers = self._subscriptions.get(key)
        if followers is not None:
            self._changed_keys[key] = None
            followers.discard(subscription)
            if not followers:
                del self._subscriptions[key]

    def wake(self, subscription: Subscription) -> None:
        self._changed_keys.update(dict.fromkeys(subscription.positions))
        self._interrupt_read()

    def _interrupt_read(self) -> None:
        """Let the next read begin soon, with the streams of now."""
        self._changed.set()
        if not self._blocking:
            return
        self._again = self._waking is not None
        if self._waking is None:
            self._waking = asyncio.create_task(self._interrupt())

    async def aclose(self) -> None:
        self._end_all()
        await end_tasks({task for task in (self._task, self._waking) if task is not None})
        await self._redis.aclose()

    def _end_all(self) -> None:
        self._closed = True
        for followers in list(self._subscriptions.values()):
            for subscription in list(followers):
                subscription.close()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            positions = self._positions()
            if not positions:
                await self._changed.wait()
                continue
            positions[self._wake_key] = self._wake_position
            await self._round(positions)

    async def _round(self, positions: dict[bytes, bytes]) -> None:
        self._blocking = True
        try:
            reply = await self._read(positions)
        finally:
            self._blocking = False
        woken = reply.pop(self._wake_key, [])
        if woken:
            self._wake_position = woken[-1][0]
        self._changed_keys.update(dict.fromkeys(reply))
        for key, entries in reply.items():
            for subscription in tuple(self._subscriptions.get(key, ())):
                # A subscription added during the read, from an earlier position, is served by the
                # next read.
                if parse_id(positions[key]) <= parse_id(subscription.positions[key]):
                    for entry_id, fields in entries:
                        subscription.push(key, entry_id, fields)

    def _positions(self) -> dict[bytes, bytes]:
        """Return where the next read starts: per stream, the smallest position of its readers."""
        for key in self._changed_keys:
            followers = self._subscriptions.get(key, ())
            if starts := [each.positions[key] for each in followers if each.wants_more]:
                self._starts[key] = min(starts, key=parse_id)
            else:
                self._starts.pop(key, None)
        self._changed_keys.clear()
        return dict(self._starts)

    async def _interrupt(self) -> None:
        try:
            interruption = [
                ("XADD", self._wake_key, "MAXLEN", "=", 1, "*", "w", ""),
                ("EXPIRE", self._wake_key, WAKE_TTL_S),
            ]
            await execute_all(self._commands.redis, interruption)
        except (exceptions.RedisError, OSError):
            pass  # the reader looks by itself before long
        finally:
            self._waking = None
        # The read that it ended may have been followed by one without the streams added since.
        if self._again and self._changed.is_set():
            self._interrupt_read()


class ClusterReaders(Readers):
    """`Readers` of a cluster: one task with a blocking XREAD per stream and subscription."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._subscriptions: set[Subscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # Set, then replaced, when a paused reader has room again.
        self._room = asyncio.Event()

    def _add(self, subscription: Subscription, keys: Iterable[bytes]) -> None:
        self._subscriptions.add(subscription)
        for key in keys:
            task = watched(self._run(key, subscription), "results reader", subscription.close)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def remove(self, key: bytes, subscription: Subscription) -> None:
        """Leave a stream; the task notices after its read."""
        if subscription.closed:
            self._subscriptions.discard(subscription)

    def wake(self, subscription: Subscription) -> None:
        self._room.set()
        self._room = asyncio.Event()

    async def aclose(self) -> None:
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.close()
        await end_tasks(self._tasks)
        await self._redis.aclose()

    async def _run(self, key: bytes, subscription: Subscription) -> None:
        while not subscription.closed and key in subscription.positions:
            if not subscription.wants_more:
                await self._room.wait()
                continue
            reply = await self._read({key: subscription.positions[key]})
            for entry_id, fields in reply.get(key, ()):
                if key in subscription.positions:
                    subscription.push(key, entry_id, fields)


def readers_of(keys: Keys, commands: Commands) -> Readers:
    """Return the readers for this kind of server."""
    is_cluster = commands.server.is_cluster
    return ClusterReaders(commands.server) if is_cluster else StreamReader(keys, commands)
