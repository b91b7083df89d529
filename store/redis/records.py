"""Records on Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from redis import exceptions

from ..records import Command
from .client import Commands, transact

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


class RedisRecords(Commands):
    """`Records` of one server."""

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
