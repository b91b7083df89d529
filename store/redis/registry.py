"""The model registry on Redis: a hash of records, and a hash of models that accept no requests.

Both share the slot of all requests streams, so that publishing and closing a model are atomic.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..registry import ModelRecord, Records, Traffic
from .client import Commands, readable
from .keys import Keys, parse_id

_decode = msgspec.json.Decoder(ModelRecord).decode

_PUT = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
end
return redis.status_reply('OK')
"""

# Clients may still believe that a removed model is part of the deployment.
_REMOVE = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], 'removed')
return redis.status_reply('OK')
"""

_TRAFFIC = """
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


class RedisModelRegistry:
    """`ModelRegistry` as a hash, which outlives the deployment's processes."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._keys = keys
        self._commands = commands

    async def read(self) -> Records:
        found = await self._commands.run("HGETALL", self._keys.models)
        records: Records = {}
        for name, raw in sorted(found.items()):
            if (record := readable(_decode, raw, "models")) is not None:
                records[name.decode()] = record
        return records

    async def put(self, record: ModelRecord) -> None:
        closed = "" if record.takes_requests else record.state
        await self._eval(_PUT, record.spec.id, msgspec.json.encode(record), closed)

    async def remove(self, model: str) -> None:
        await self._eval(_REMOVE, model)

    async def traffic(self, models: Sequence[str]) -> list[Traffic]:
        if not models:
            return []
        keys = [self._keys.requests_of(model) for model in models]
        rows = await self._commands.run("EVAL", _TRAFFIC, len(keys), *keys)
        return [Traffic(int(length), parse_id(last)[0]) for length, last in rows]

    async def _eval(self, script: str, *arguments: str | bytes) -> None:
        keys = (self._keys.models, self._keys.closed)
        await self._commands.run("EVAL", script, 2, *keys, *arguments)
