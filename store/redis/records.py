"""Records on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from redis import exceptions

from ..records import Command
from .client import Commands, Server, execute_all, transact

_ROUND_TRIPS = 4
"""Round trips at once. Callers that come meanwhile share the next one."""

_STREAM_ENDS = """
local rows = {}
for i = 1, #KEYS do
  local info = redis.pcall('XINFO', 'STREAM', KEYS[i])
  local of = {length = 0, ['last-generated-id'] = '0-0'}
  if not info.err then
    for j = 1, #info, 2 do of[info[j]] = info[j + 1] end
  end
  rows[i] = {of['length'], of['last-generated-id']}
end
return rows
"""


@dataclass(eq=False)
class _RoundTrip:
    """The commands of several callers."""

    commands: list[Command] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RedisRecords(Commands):
    """`Records` of one server."""

    def __init__(self, server: Server, connections: int) -> None:
        super().__init__(server, connections)
        self._turns = asyncio.Semaphore(_ROUND_TRIPS)
        self._next = _RoundTrip()

    async def run_all(self, commands: Sequence[Command], raise_on_error: bool = True) -> list[Any]:
        return await self.once(lambda: self._together(commands, raise_on_error))

    async def retry_all(
        self, what: str, commands: Sequence[Command], raise_on_error: bool = True
    ) -> list[Any]:
        return await self.idempotent(what, lambda: self._together(commands, raise_on_error))

    async def transact(self, key: bytes, commands: Sequence[Command]) -> None:
        await self.once(lambda: transact(self.redis, key, commands))

    async def replace(
        self, key: bytes, field: bytes, known: bytes, fields: Mapping[bytes, bytes]
    ) -> bool:
        pairs = chain.from_iterable(fields.items())
        return await self.write_if(
            key, ("HGET", key, field), lambda found: (found or b"") == known, ("HSET", key, *pairs)
        )

    async def write_if(
        self, key: bytes, read: Command, holds: Callable[[Any], bool], write: Command
    ) -> bool:
        """Write a record if `holds` is true of what `read` returns; return whether it was written.

        In a transaction, not a script: a gateway needs no right to run scripts.
        """
        return await self.once(lambda: self._write_if(key, read, holds, write))

    async def stream_ends(self, streams: Sequence[bytes]) -> list[tuple[int, bytes]]:
        if not streams:
            return []
        rows = await self.run("EVAL", _STREAM_ENDS, len(streams), *streams)
        return [(int(length), last) for length, last in rows]

    async def _together(self, commands: Sequence[Command], raise_on_error: bool) -> list[Any]:
        """Send commands in a round trip that other callers may share. In a cluster it is theirs
        alone: a node that fails is no trouble of callers of others."""
        if self.server.is_cluster:
            return await execute_all(self.redis, commands, raise_on_error)
        trip = self._next
        first = len(trip.commands)
        trip.commands += commands
        async with self._turns:
            if trip is self._next:
                self._next = _RoundTrip()
                try:
                    trip.replies = await execute_all(self.redis, trip.commands, False)
                except BaseException as error:
                    trip.error = error
                    raise
                finally:
                    trip.ended.set()
        await trip.ended.wait()
        if trip.error is not None:
            raise trip.error
        replies = trip.replies[first : first + len(commands)]
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and raise_on_error:
            raise errors[0]
        return replies

    async def _write_if(
        self, key: bytes, read: Command, holds: Callable[[Any], bool], write: Command
    ) -> bool:
        async with self.redis.pipeline(transaction=True) as pipeline:
            await pipeline.watch(key)
            if not holds(await pipeline.execute_command(*read)):
                return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.execute_command(*write)
            try:
                await pipeline.execute()
            except exceptions.WatchError:
                return False
        return True
