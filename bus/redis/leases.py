"""Leases on requests stream entries: renewal, takeover, shedding, and the queue length.

Several pipelines ("lanes") share the stream. Each is one consumer of the group, so the group's
pending list has each entry's owner and the age of its lease. Scripts read and act atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ...config import BusConfig, BusError, LaneReplaced
from ...store.redis.client import Commands, execute, persist
from ...store.redis.keys import Keys, entry_name, split_entry
from ..entries import RequestEntry
from ..public import GenerateRequest
from .entries import IS_SAME, Entries, entries_of
from .starts import ProcessStart
from .waiting import WaitingEntries

Identity = tuple[str, str]
"""An entry's id on its stream, and its digest."""

SHED_PAGE = 64
"""Entries refused per call."""

LOOK_PAGE = 256
"""Entries whose tenant is read per call."""

TAKE_OVER_PAGE = 1024
RENEW_PAGE = 4096
"""Entries per script; a Lua function takes fewer than 8000 arguments."""

REPORT_LIFETIME_MS = 5000
"""Lifetime of a lane's number of begun requests, and of the queue length: five heartbeats."""

FEW_LANES = 16
"""Number of lanes up to which each report adds up the queue length."""

DEFAULT_TENANT: str = GenerateRequest().tenant

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# Keepers of a lane are numbered (`ProcessStart`), so that a server that restarts with an older
# record doesn't make a predecessor the keeper again.
_NUMBER = """
local function number_of(keeper)
  return tonumber(string.match(keeper or '', '^(%d+)-')) or 0
end
"""

# This process becomes the keeper of the lane, with a first lease, unless a later one is.
_ENLIST = f"""{_NOW}{_NUMBER}
local lane, keeper, lease = ARGV[1], ARGV[2], ARGV[3]
local other = string.match(redis.call('HGET', KEYS[1], lane) or '', ' (.*)')
if number_of(other) > number_of(keeper) then return redis.error_reply('REPLACED') end
redis.call('HSET', KEYS[1], lane, string.format('%.0f %s', now + lease, keeper))
return keeper
"""

# An entry without an owner that is still in the stream (the group was recreated) is neither held
# nor lost: Redis will hand it out again. If the registry doesn't know this lane, the server lost
# its data and no lane answered the missing entries. Lanes dead for an hour leave the registry.
_RENEW = f"""{_NOW}{_NUMBER}
local group, consumer, lane, keeper, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local kept = redis.call('HGET', KEYS[2], lane)
local other = kept and string.match(kept, ' (.*)')
if other and other ~= keeper and number_of(other) >= number_of(keeper) then
  return redis.error_reply('REPLACED')
end
redis.call('HSET', KEYS[2], lane, string.format('%.0f %s', now + lease, keeper))
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local ends = tonumber(string.match(all[i + 1], '^%d+')) or 0
  if ends + 3600000 < now then redis.call('HDEL', KEYS[2], all[i]) end
end
local lost, gone, claim = {{}}, {{}}, {{'XCLAIM', KEYS[1], group, consumer, 0}}
for i = 6, #ARGV do
  local row = redis.pcall('XPENDING', KEYS[1], group, ARGV[i], ARGV[i], 1)
  if row.err then
    if string.sub(row.err, 1, 7) == 'NOGROUP' then return {{lost, gone}} end
    return row
  end
  if row[1] and row[1][2] == consumer then
    claim[#claim + 1] = ARGV[i]
  elseif row[1] then
    lost[#lost + 1] = ARGV[i]
  elseif #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 0 then
    gone[#gone + 1] = ARGV[i]
  end
end
if #claim > 5 then
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
end
return {{lost, kept and gone or {{}}}}
"""

# XCLAIM drops deleted entries.
_TAKE_OVER = """
local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', ARGV[4])
if rows.err then
  if string.sub(rows.err, 1, 7) == 'NOGROUP' then return {} end
  return rows
end
if #rows == 0 then return {} end
local claim = {'XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3]}
for _, row in ipairs(rows) do claim[#claim + 1] = row[1] end
return redis.call(unpack(claim))
"""

# Acknowledge and delete atomically: an entry that is only acknowledged would come back when the
# group is recreated. Entries of another lane stay; entries without an owner are removed too. With
# marks (two keys per entry), entries that have neither mark on this server stay, and their numbers
# are returned, from 0. So are those of which the id is another entry's.
_ACKNOWLEDGE = f"""{IS_SAME}
local group, consumer, unanswered = ARGV[1], ARGV[2], {{}}
for i = 3, #ARGV, 2 do
  local id, number = ARGV[i], (i - 3) / 2
  local row = redis.pcall('XPENDING', KEYS[1], group, id, id, 1)
  if row.err and string.sub(row.err, 1, 7) ~= 'NOGROUP' then return row end
  if row.err or not row[1] or row[1][2] == consumer then
    local mark, same = KEYS[2 + 2 * number], is_same(KEYS[1], id, ARGV[i + 1])
    if same == false or (same and mark
        and redis.call('EXISTS', mark, KEYS[3 + 2 * number]) == 0) then
      unanswered[#unanswered + 1] = number
    else
      if not row.err then redis.call('XACK', KEYS[1], group, id) end
      redis.call('XDEL', KEYS[1], id)
    end
  end
end
return unanswered
"""

_ASSIGNED = """
local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', ARGV[2], ARGV[3], ARGV[4])
if rows.err then return {} end
for i, row in ipairs(rows) do rows[i] = row[1] end
return rows
"""

# Number of untaken entries, and the id of the last one handed out. Acknowledged entries are
# deleted, so the rest is pending. An error means that there is no group yet.
_QUEUED = """
local queued, last = redis.call('XLEN', KEYS[1]), '0-0'
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1])
if pending.err then return {queued, last} end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local of = {}
  for i = 1, #group, 2 do of[group[i]] = group[i + 1] end
  if of['name'] == ARGV[1] then last = of['last-delivered-id'] end
end
return {queued - pending[1], last}
"""

# Tenants of the entries after an id. In JSON text a quote is escaped, so a key can't be mistaken.
# The result only orders refusals, so an unreadable tenant counts as one of its own.
_TENANTS = """
local rows = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])) do
  local tenant = ''
  for i = 1, #entry[2], 2 do
    local body = entry[2][i + 1]
    if entry[2][i] == 'json' then
      tenant = ARGV[3]
      local at = string.find(body, '"tenant"', 1, true)
      while at do
        local found = string.match(body, '^"tenant"%s*:%s*"([^"]*)"', at)
        if found then tenant = string.sub(found, 1, 128) end
        at = not found and string.find(body, '"tenant"', at + 8, true)
      end
    end
  end
  rows[#rows + 1] = {entry[1], tenant}
end
return rows
"""

# Remove entries that were answered: untaken ones, or those of any owner too. A lane that took one
# meanwhile finds the answer.
_REMOVE = f"""{IS_SAME}
local group, any_owner, removed = ARGV[1], ARGV[2] == '1', 0
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local row = redis.pcall('XPENDING', KEYS[1], group, id, id, 1)
  if row.err and string.sub(row.err, 1, 7) ~= 'NOGROUP' then return row end
  if (row.err or not row[1] or any_owner) and is_same(KEYS[1], id, ARGV[i + 1]) then
    removed = removed + redis.call('XDEL', KEYS[1], id)
    if row[1] then redis.call('XACK', KEYS[1], group, id) end
  end
end
return removed
"""

# The group's lag doesn't give the queue length: a lane takes far more entries than it runs, and the
# lag is unknown once an unread entry was deleted. But answered entries are deleted, so the stream
# holds all unanswered ones, and each lane reports how many of them have begun. A silent lane counts
# as idle.
#
# To add them up costs as much as there are lanes, so many lanes share one sum of the last second.
_COUNT = f"""{_NOW}
local lane, begun, lifetime = ARGV[1], ARGV[2], tonumber(ARGV[3])
if begun ~= '' then
  redis.call('HSET', KEYS[2], lane, string.format('%.0f %s', now + lifetime, begun))
end
if redis.call('HLEN', KEYS[2]) > tonumber(ARGV[5]) then
  local fresh = redis.call('PTTL', KEYS[3]) > lifetime - 900
  if fresh then return tonumber(redis.call('GET', KEYS[3])) end
end
if ARGV[4] == '' then return false end
local length = redis.call('XLEN', KEYS[1]) + ARGV[4]
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local ends, reported = string.match(all[i + 1], '^(%d+) (%d+)$')
  if ends and tonumber(ends) >= now then
    length = length - reported
  else
    redis.call('HDEL', KEYS[2], all[i])
  end
end
length = math.max(0, length)
redis.call('SET', KEYS[3], string.format('%.0f', length), 'PX', lifetime)
return length
"""


class Leases:
    """Lease commands of one lane, as the consumer `admission-{lane}`."""

    def __init__(
        self, config: BusConfig, keys: Keys, commands: Commands, start: ProcessStart
    ) -> None:
        self._config = config
        self._keys = keys
        self._commands = commands
        self._start = start
        self._keeper = ""  # none before `enlist`
        self.consumer = consumer_of(config.lane)
        self._waiting = WaitingEntries()

    async def enlist(self) -> None:
        """Make this process the keeper of the lane, with a first, short lease.

        Raises:
            LaneReplaced: A process that has started later is the keeper.
        """
        self._keeper = await self._start.keeper()
        lane = (self._config.lane, self._keeper, 1000)
        await self._unless_replaced("lanes", _ENLIST, [self._keys.lanes], *lane)

    async def renew(self, lease_s: float, ids: Sequence[str]) -> tuple[set[str], set[str]]:
        """Renew the leases of entries, by their ids on the stream; return the ids now owned by
        another lane, and the ids that no longer exist.

        Raises:
            LaneReplaced: As `enlist`.
        """
        lost: list[bytes] = []
        gone: list[bytes] = []
        for start in range(0, max(1, len(ids)), RENEW_PAGE):
            reply = await self._unless_replaced(
                "leases",
                _RENEW,
                [self._keys.requests, self._keys.lanes],
                *(self._config.group, self.consumer, self._config.lane, self._keeper),
                int(lease_s * 1000),
                *ids[start : start + RENEW_PAGE],
            )
            lost += reply[0]
            gone += reply[1]
        return _decoded(lost), _decoded(gone)

    async def _unless_replaced(self, *evaluated: Any) -> Any:
        """Run a script as `_eval`, which fails if a later process is the lane's keeper."""
        try:
            return await self._eval(*evaluated)
        except BusError as error:
            if not str(error).endswith(" REPLACED"):
                raise
            raise LaneReplaced(
                f"another process has started to serve the lane {self._config.lane!r}, so this one "
                "stops; give each pipeline a bus.lane of its own"
            ) from None

    async def take_over(self, lease_s: float, max_items: int) -> Entries:
        """Take over entries whose lease is older than `lease_s`."""
        count = min(max_items, TAKE_OVER_PAGE)
        if count < 1:
            return []
        group = (self._config.group, self.consumer, max(1, int(lease_s * 1000)), count)
        return entries_of(await self._eval("leases", _TAKE_OVER, [self._keys.requests], *group))

    async def acknowledge(
        self, entries: Sequence[Identity], marks: Sequence[bytes] = ()
    ) -> list[int]:
        """Remove entries for good, except those of another lane.

        Args:
            entries: At most `ACK_BATCH`.
            marks: Two keys per entry, on the node of the requests; either one shows that its
                terminal message is written. Empty: unconditional.

        Returns:
            Indexes of the entries that stay: those without a mark, and those whose id is another
            entry's.
        """
        keys = (self._keys.requests, *marks)
        unanswered = await persist(
            self._commands.server,
            "acknowledgements",
            lambda: execute(
                self._commands.redis,
                *("EVAL", _ACKNOWLEDGE, len(keys), *keys),
                *(self._config.group, self.consumer, *chain.from_iterable(entries)),
            ),
        )
        return [int(each) for each in unanswered]

    async def assigned(self, last: str, most: int) -> set[str]:
        """Return at most so many entries, up to `last`, that are this lane's."""
        arguments = (self._config.group, last, most, self.consumer)
        ids = await self._eval("requests", _ASSIGNED, [self._keys.requests], *arguments)
        return {entry_name(each.decode(), self._keys.shard) for each in ids}

    async def excess(self, max_queued: int) -> tuple[int, Entries]:
        """Return the number of untaken entries, and some of the excess.

        The excess is the newest entries of the tenants with most waiting. Each entry's tenant is
        read once while there are too many: at most `2 * max_queued` entries.
        """
        waiting, key, group = self._waiting, [self._keys.requests], self._config.group
        queued, last = await self._eval("requests", _QUEUED, key, group)
        waiting.forget_taken(last)
        if queued <= max_queued:
            if 2 * queued < max_queued:
                waiting.clear()
            return int(queued), []
        page = LOOK_PAGE
        while page == LOOK_PAGE and len(waiting) <= 2 * max_queued:
            looked = (waiting.position, LOOK_PAGE, DEFAULT_TENANT)
            rows = await self._eval("requests", _TENANTS, key, *looked)
            waiting.add((entry_id, tenant.decode("utf-8", "replace")) for entry_id, tenant in rows)
            page = len(rows)
        wanted = min(int(queued) - max_queued, SHED_PAGE)
        entries: Entries = []
        while len(entries) < wanted and (ids := waiting.take_newest(wanted - len(entries))):
            ranges = [("XRANGE", self._keys.requests, each, each) for each in ids]
            found = await self._commands.retry_all("requests", ranges)
            entries += chain.from_iterable(found)  # those that still exist
        return int(queued), entries

    async def remove(self, entries: Sequence[Identity], *, any_owner: bool = False) -> int:
        """Remove untaken entries, or those of any owner; return how many."""
        about = (self._config.group, int(any_owner), *chain.from_iterable(entries))
        return int(await self._eval("requests", _REMOVE, [self._keys.requests], *about))

    async def count(self, begun: int | None, others: int | None) -> int | None:
        """Record this lane's begun requests, and return the queue length, over all lanes.

        Args:
            begun: None if unknown; then only the number is refreshed.
            others: Number of entries on the other shards; None if unknown.

        Returns:
            None if `others` is unknown and there is no number of the last second.
        """
        keys = (self._keys.requests, self._keys.begun, self._keys.queue_length)
        reported, elsewhere = ("" if number is None else number for number in (begun, others))
        lane = self._config.lane
        arguments = (lane, reported, REPORT_LIFETIME_MS, elsewhere, FEW_LANES)
        length = await self._commands.run("EVAL", _COUNT, len(keys), *keys, *arguments)
        return None if length is None else int(length)

    async def is_taken(self, raw: str) -> bool:
        """Return whether no entry up to this one waits. Raises BusError."""
        key, group = self._keys.requests, self._config.group
        groups = await self._commands.run_all([("XINFO", "GROUPS", key)], raise_on_error=False)
        if isinstance(groups[0], Exception):
            groups = [[]]  # no stream, or no right to look at it
        named = (each for each in groups[0] if each[b"name"] == group.encode())
        last = next((each[b"last-delivered-id"].decode() for each in named), "0")
        return not await self._commands.run("XRANGE", key, f"({last}", raw, "COUNT", 1)

    async def _eval(self, what: str, script: str, keys: list[bytes], *arguments: Any) -> Any:
        return await self._commands.retry(what, "EVAL", script, len(keys), *keys, *arguments)


def identity_of(entry: RequestEntry) -> Identity:
    """Return an entry's id on its stream, and its digest."""
    return split_entry(entry.entry_id)[0], entry.digest


def _decoded(ids: Sequence[bytes]) -> set[str]:
    return {each.decode() for each in ids}


def consumer_of(lane: str) -> str:
    """Return a lane's consumer name. A successor uses the same, and finds the pending entries."""
    return f"admission-{lane}"


def live_lanes(registry: dict[bytes, bytes], now_ms: int) -> list[str]:
    """Return the lanes whose lease has not expired, sorted."""
    live = []
    for lane, kept in registry.items():
        ends = kept.partition(b" ")[0]
        if ends.isdigit() and int(ends) >= now_ms:
            live.append(lane.decode("utf-8", "replace"))
    return sorted(live)
