"""A client whose commands share one connection: written at once, answered in order.

redis-py takes a connection from a pool for each command, which costs 90 µs of processor time; this
costs 25 µs. A caller that is cancelled leaves its reply to be dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import hiredis
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio import Connection, Redis
from redis.connection import HiredisRespSerializer

AT_ONCE = 4
"""Writes without a reply, from which on those in one turn of the loop are sent together."""

_INCOMPLETE = object()


def options_of(command: Sequence[Any]) -> dict[str, bool]:
    """Return what redis-py's parsers of replies take: that of SET detects GET by an option."""
    return {"get": True} if command[0] == "SET" and "GET" in command else {}


_serializer = HiredisRespSerializer()


class _Batch:
    """Commands that were written together, and their replies so far."""

    __slots__ = ("number", "replied", "replies", "written_s")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.replies: list[Any] = []
        self.replied: asyncio.Future[list[Any]] = loop.create_future()
        self.written_s = loop.time()


class _Line(asyncio.Protocol):
    """A connection that redis-py has opened."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._unwritten: list[bytes] = []
        self._waiting: deque[_Batch] = deque()
        self._check: asyncio.TimerHandle | None = None
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self.is_open = True
        writer = connection._writer
        if writer is None:
            raise exceptions.ConnectionError("the connection was lost while opening")
        self._transport = cast(asyncio.Transport, writer.transport)
        self._opener = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def write(self, commands: Iterable[Sequence[Any]]) -> asyncio.Future[list[Any]]:
        """Write commands; return what gets all of their replies, errors among them.

        Raises:
            DataError: An argument has no form on the wire. Nothing is written.
        """
        packed = [part for each in commands for part in _serializer.pack(*each)]
        batch = _Batch(len(packed), self._loop)
        is_first = not self._unwritten
        self._unwritten += packed
        if is_first and len(self._waiting) < AT_ONCE:
            self._flush()
        elif is_first:
            self._loop.call_soon(self._flush)
        self._waiting.append(batch)
        if self._check is None:
            self._check = self._loop.call_later(self._timeout_s, self._check_age)
        return batch.replied

    def _flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            self._transport.write(unwritten[0] if len(unwritten) == 1 else b"".join(unwritten))

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not isinstance(reply, hiredis.PushNotification):
                    self._reply(reply)
        except (exceptions.InvalidResponse, IndexError) as error:
            self.close(exceptions.ConnectionError(f"the server's reply is unreadable: {error}"))

    def _reply(self, reply: Any) -> None:
        batch = self._waiting[0]
        batch.replies.append(reply)
        if len(batch.replies) == batch.number:
            self._waiting.popleft()
            if not batch.replied.done():
                batch.replied.set_result(batch.replies)
        if isinstance(reply, exceptions.ReadOnlyError):
            # A master that became a replica: a new connection finds its successor.
            self.close(exceptions.ConnectionError("the previous master is now a replica"))

    def _check_age(self) -> None:
        """End the connection if the oldest command's reply is overdue."""
        self._check = None
        if not self._waiting:
            return
        left_s = self._waiting[0].written_s + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.close(exceptions.TimeoutError("no reply in time"))
        else:
            self._check = self._loop.call_later(left_s, self._check_age)

    def connection_lost(self, error: Exception | None) -> None:
        self._opener.connection_lost(error)
        self.close(exceptions.ConnectionError(f"the server closed the connection: {error}"))

    def close(self, error: Exception) -> None:
        """End the connection; commands without a reply raise `error`."""
        self.is_open = False
        if self._check is not None:
            self._check.cancel()
            self._check = None
        self._transport.abort()
        self._connection._close()  # type: ignore[no-untyped-call]
        waiting, self._waiting = self._waiting, deque()
        for batch in waiting:
            if not batch.replied.done():
                batch.replied.set_exception(error)
                batch.replied.exception()  # the caller may have been cancelled


class MultiplexedRedis(Redis):
    """`Redis` with one connection for all commands and pipelines without a transaction.

    Its pool opens it, and has the connections of transactions with WATCH.
    """

    _line: _Line | None = None
    _opening: asyncio.Task[_Line] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        (reply,) = await self.execute_all([args])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def execute_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip; return replies, and errors of single commands.

        Raises:
            RedisError, OSError: The connection failed; some of the commands may have run.
        """
        if not commands:
            return []
        replied = self.begin(commands)
        if replied is None:
            replied = (await self._open()).write(commands)
        replies = await replied
        callbacks: Any = self.response_callbacks
        for place, command in enumerate(commands):
            reply = replies[place]
            if isinstance(reply, exceptions.ConnectionError):  # a server that is loading
                raise reply
            callback = callbacks.get(command[0])
            if callback is not None and not isinstance(reply, Exception):
                replies[place] = callback(reply, **options_of(command))
        return replies

    def begin(self, commands: Sequence[Sequence[Any]]) -> asyncio.Future[list[Any]] | None:
        """Write commands at once; return what gets their raw replies, or raises as `execute_all`.

        None without a connection: nothing is written.
        """
        line = self._line
        return line.write(commands) if line is not None and line.is_open else None

    async def _open(self) -> _Line:
        """Connect; concurrent callers share the attempt."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
        return await asyncio.shield(self._opening)

    async def _connect(self) -> _Line:
        pool = self.connection_pool
        connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            self._line = _Line(connection, pool.connection_kwargs["socket_timeout"])
            return self._line
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            self._opening = None

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._line is not None:
            self._line.close(exceptions.ConnectionError("the client was closed"))
        await super().aclose(close_connection_pool)
