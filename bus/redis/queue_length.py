"""Queue length: requests whose first sample has not begun, on the stream or in a lane.

The group's lag doesn't say: a lane takes far more entries than it runs, and the lag is unknown once
an unread entry was deleted. But answered entries are deleted, so the stream holds all unanswered
ones, and each lane reports how many of them have begun. A silent lane counts as idle.
"""

from __future__ import annotations

from ...store.redis.client import Commands
from ...store.redis.keys import Keys

TOLD_FOR_MS = 5000
"""Lifetime of a lane's report and of the resulting number: five heartbeats."""

_COUNT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lane, begun, told_for = ARGV[1], ARGV[2], tonumber(ARGV[3])
if begun ~= '' then
  redis.call('HSET', KEYS[2], lane, string.format('%.0f %s', now + told_for, begun))
end
local length = redis.call('XLEN', KEYS[1])
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local ends, told = string.match(all[i + 1], '^(%d+) (%d+)$')
  if ends and tonumber(ends) >= now then
    length = length - told
  else
    redis.call('HDEL', KEYS[2], all[i])
  end
end
length = math.max(0, length)
redis.call('SET', KEYS[3], string.format('%.0f', length), 'PX', told_for)
return length
"""


class QueueLength:
    """The queue length over all lanes, written where any client can read it."""

    def __init__(self, lane: str, keys: Keys, commands: Commands) -> None:
        self._lane = lane
        self._keys = (keys.requests, keys.begun, keys.queue_length)
        self._commands = commands

    async def count(self, begun: int | None) -> int:
        """Record this lane's begun requests, and return the queue length.

        Args:
            begun: None if unknown; then only the number is refreshed.
        """
        keys, argument = self._keys, "" if begun is None else begun
        command = ("EVAL", _COUNT, len(keys), *keys, self._lane, argument, TOLD_FOR_MS)
        return int(await self._commands.run(*command))
