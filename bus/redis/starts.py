"""The order in which the processes of a lane have started."""

from __future__ import annotations

import asyncio
import uuid

from ...config.errors import stage_replaced
from ...store.redis.client import Commands
from ...store.redis.keys import Keys

# At least the server's time in milliseconds, since it may have lost the last numbers.
_START = """
local time, last = redis.call('TIME'), 0
local all = redis.call('HGETALL', KEYS[1])
for i = 2, #all, 2 do
  last = math.max(last, tonumber(string.match(all[i], '^%d+')) or 0)
end
local this = math.max(last + 1, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], '', string.format('%.0f', this))
return this
"""

# Return the number of the process that has opened a stage last, after this one is recorded. A
# command of an earlier process changes nothing. After a failover the record may be an older one.
_NEWEST = """
local record = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local last, this = tonumber(string.match(record, '^%d+') or 0), tonumber(ARGV[2])
if this <= last then return last end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', this, ARGV[3]))
return this
"""


class ProcessStart:
    """The start of this process among those that serve its lane; the one that starts last serves.

    A process has one number for all its stages and for the lease of its lane. If each stage had its
    own, two processes that start at once would find stages of each other newer, and both end; and
    a process that stands still during its start would take the lane from its successor.

    Attributes:
        name: Of the process.
    """

    def __init__(self, keys: Keys, commands: Commands, lane: str) -> None:
        self.name = uuid.uuid4().hex[:16]
        self._keys, self._commands, self._lane = keys, commands, lane
        self._number = 0
        self._starting = asyncio.Lock()

    async def number(self) -> int:
        """Return this process's number; wait while Redis is unreachable."""
        async with self._starting:
            if not self._number:
                command = ("EVAL", _START, 1, self._keys.openings)
                self._number = int(await self._commands.retry("start of the process", *command))
        return self._number

    async def keeper(self) -> str:
        """Return the number and the name, for the registry of lanes."""
        return f"{await self.number()}-{self.name}"

    async def open(self, stage: str) -> None:
        """Record that this process opens a stage.

        Raises:
            LaneReplaced: A later process has opened it.
        """
        if not await self.is_newest(stage):
            raise stage_replaced(stage, self._lane)

    async def is_newest(self, stage: str) -> bool:
        """Return whether no later process has opened a stage."""
        mine = await self.number()
        command = ("EVAL", _NEWEST, 1, self._keys.openings, stage, mine, self.name)
        return int(await self._commands.retry(f"opening of {stage}", *command)) == mine
