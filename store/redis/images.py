"""Decoded images on Redis: a string per image, and the leases beside them.

All keys are in one slot of a cluster, so that scripts keep images, leases and the total consistent:
an image is visible once all of it is written, and its room is free once it is gone.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..images import FOR_EVER, MOST_BYTES, ImageUsage, StoredImage
from .client import Commands
from .keys import Keys, beside

PIECE_BYTES = 1 << 20
"""Bytes of one command: far below the server's limits on values and query buffers, and short
enough to delay no other command."""

_PIECES = 4
"""Pieces of one round trip."""

_PART_TTL_S = 120
"""Seconds after which the pieces of a writer that died are deleted."""

# KEYS: sizes, leases, holders, free, total. A lease's member is the id, 64 characters, and the
# holder.
_COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function unhold(id)
  if redis.call('HINCRBY', KEYS[3], id, -1) <= 0 then
    redis.call('HDEL', KEYS[3], id)
    redis.call('ZADD', KEYS[4], now, id)
  end
end
local function hold(id, holder, for_ms)
  local ends = for_ms == '' and '+inf' or now + for_ms
  if redis.call('ZADD', KEYS[2], 'GT', ends, id .. holder) == 1 then
    redis.call('HINCRBY', KEYS[3], id, 1)
    redis.call('ZREM', KEYS[4], id)
  end
end
local over = redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE', 'LIMIT', 0, 1000)
for _, member in ipairs(over) do
  redis.call('ZREM', KEYS[2], member)
  unhold(string.sub(member, 1, 64))
end
"""

# ARGV: holder, its time in ms ("" for ever), ids.
_HOLD = f"""{_COMMON}
local found = {{}}
for i = 3, #ARGV do
  local size = redis.call('HGET', KEYS[1], ARGV[i])
  if size then hold(ARGV[i], ARGV[1], ARGV[2]) end
  found[i - 2] = size or ''
end
return found
"""

# ARGV: holder, ids.
_RELEASE = f"""{_COMMON}
for i = 2, #ARGV do
  if redis.call('ZREM', KEYS[2], ARGV[i] .. ARGV[1]) == 1 then unhold(ARGV[i]) end
end
return redis.status_reply('OK')
"""

# KEYS also: the part, and the data. ARGV: id, width and height and bytes, bytes, limit, what keys
# of data begin with, holder ("" for none), its time.
_COMMIT = f"""{_COMMON}
local id, bytes = ARGV[1], tonumber(ARGV[3])
if redis.call('HEXISTS', KEYS[1], id) == 0 then
  local total = tonumber(redis.call('GET', KEYS[5]) or '0')
  while total + bytes > tonumber(ARGV[4]) do
    local oldest = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
    if not oldest then
      redis.call('SET', KEYS[5], total)
      redis.call('DEL', KEYS[6])
      return 0
    end
    local width, height, size =
      string.match(redis.call('HGET', KEYS[1], oldest), '(%d+) (%d+) ?(%d*)')
    -- Earlier versions stored three bytes per pixel, and no size.
    total = total - (tonumber(size) or 3 * width * height)
    redis.call('ZREM', KEYS[4], oldest)
    redis.call('HDEL', KEYS[1], oldest)
    redis.call('DEL', ARGV[5] .. oldest)
  end
  redis.call('RENAME', KEYS[6], KEYS[7])
  redis.call('PERSIST', KEYS[7])
  redis.call('HSET', KEYS[1], id, ARGV[2])
  redis.call('SET', KEYS[5], total + bytes)
else
  redis.call('DEL', KEYS[6])
end
if ARGV[6] ~= '' then
  hold(id, ARGV[6], ARGV[7])
elseif redis.call('HEXISTS', KEYS[3], id) == 0 then
  redis.call('ZADD', KEYS[4], now, id)
end
return 1
"""


class RedisImages:
    """`ImageStore` over one Redis server, by whose clock leases end."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._commands = commands
        self._family = keys.images
        names = ("sizes", "leases", "holders", "free", "total")
        self._keys = [beside(self._family, name) for name in names]

    async def put(
        self,
        id: str,
        image: StoredImage,
        *,
        holder: str = "",
        for_s: float = FOR_EVER,
        max_bytes: int = MOST_BYTES,
    ) -> bool:
        if holder and await self.hold([id], holder, for_s) != [None]:
            return True
        # Its own name, so that two writers of one image don't mix.
        part = beside(self._family, f"part:{id}:{uuid.uuid4().hex[:16]}")
        for commands in _batches(part, image.features):
            await self._commands.retry_all("images", commands)
        data = beside(self._family, "data:")
        size = len(image.features)
        sizes = f"{image.width} {image.height} {size}"
        arguments = (id, sizes, size, max_bytes, data, holder, _ms(for_s))
        stored = await self._eval(_COMMIT, arguments, part, data + id.encode())
        return bool(stored)

    async def get(self, id: str) -> StoredImage | None:
        size = await self._commands.retry("images", "HGET", self._keys[0], id)
        if size is None:
            return None
        width, height, length = map(int, size.split())
        key = beside(self._family, f"data:{id}")
        features = bytearray()
        step = _PIECES * PIECE_BYTES
        for start in range(0, length, step):
            commands = [
                ("GETRANGE", key, at, at + PIECE_BYTES - 1)
                for at in range(start, min(start + step, length), PIECE_BYTES)
            ]
            for piece in await self._commands.retry_all("images", commands):
                features += piece
        # It may have been evicted meanwhile, if it has no holder.
        return StoredImage(width, height, bytes(features)) if len(features) == length else None

    async def hold(
        self, ids: Collection[str], holder: str, for_s: float = FOR_EVER
    ) -> list[tuple[int, int] | None]:
        if not ids:
            return []
        sizes = await self._eval(_HOLD, (holder, _ms(for_s), *ids))
        found: list[tuple[int, int] | None] = []
        for size in sizes:
            width, height, *_ = map(int, size.split()) if size else (0, 0)
            found.append((width, height) if size else None)
        return found

    async def release(self, ids: Collection[str], holder: str) -> None:
        if ids:
            await self._eval(_RELEASE, (holder, *ids))

    async def usage(self) -> ImageUsage:
        sizes, _, holders, _, total = self._keys
        found = await self._commands.run_all([("HLEN", sizes), ("HLEN", holders), ("GET", total)])
        images, held, num_bytes = found
        return ImageUsage(images, held, int(num_bytes or 0))

    async def _eval(self, script: str, arguments: Sequence[Any], *more: bytes) -> Any:
        keys = (*self._keys, *more)
        return await self._commands.retry("images", "EVAL", script, len(keys), *keys, *arguments)


def _batches(key: bytes, data: bytes) -> Iterator[list[Sequence[Any]]]:
    """Yield commands that write data in pieces; each may run several times."""
    view = memoryview(data)
    step = _PIECES * PIECE_BYTES
    for start in range(0, len(data), step):
        commands: list[Sequence[Any]] = [
            ("SETRANGE", key, at, bytes(view[at : at + PIECE_BYTES]))
            for at in range(start, min(start + step, len(data)), PIECE_BYTES)
        ]
        yield [*commands, ("EXPIRE", key, _PART_TTL_S)]


def _ms(for_s: float) -> int | str:
    return "" if math.isinf(for_s) else int(for_s * 1000)
