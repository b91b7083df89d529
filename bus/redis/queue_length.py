"""How many requests wait until the first of their samples begins: on the stream, or in a lane.

The stream alone can't tell. A lane takes far more entries than it can run, so that the group's lag
is 0 while they wait in its queue; and once an entry was deleted unread, that figure is unknown. But
what is answered is deleted, so the stream holds all that is not, and each lane says how many of
these have begun. A lane that says nothing any more runs nothing.
"""

from __future__ import annotations

from ...store.redis.client import Commands
from ...store.redis.keys import Keys

TOLD_FOR_MS = 5000
"""How long a lane's word counts, and the number that was made of all: five beats of a process."""

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
    """Makes the number of what all lanes say, and writes it where anybody can read it."""

    def __init__(self, lane: str, keys: Keys, commands: Commands) -> None:
        self._lane = lane
        self._keys = (keys.requests, keys.begun, keys.queue_length)
        self._commands = commands

    async def count(self, begun: int | None) -> int:
        """Writes down how many of this lane's have begun, and with it how many wait in all.

        `begun`: None where it is not known; then only the number is made anew.
        """
        keys, argument = self._keys, "" if begun is None else begun
        command = ("EVAL", _COUNT, len(keys), *keys, self._lane, argument, TOLD_FOR_MS)
        return int(await self._commands.run(*command))
