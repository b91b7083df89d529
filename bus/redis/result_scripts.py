"""Lua scripts that write results, each atomic."""

from __future__ import annotations

# Add a terminal message to the results stream once, however often this repeats. The mark is set
# last: when Redis has no memory for the message, there is no mark.
_TOLD = """
local function tell(results, told, ttl, maxlen, raw)
  if redis.call('EXISTS', told) == 1 then return 0 end
  local reply = redis.pcall('XADD', results, 'MAXLEN', '~', maxlen, '*', 'json', raw)
  if type(reply) == 'table' and reply.err then return reply end
  redis.call('SET', told, '', 'EX', ttl)
  return 1
end
"""

# Append several entries, or a terminal one, atomically, so that neither a lost reply nor a second
# writer leaves a part. `pcall` returns Redis's own error. On a single server the results stream
# gets the terminal message in the same script: two commands could reach two servers during a
# failover.
#
# A stream with missing entries is not ended: after a failover this server lacks what the old one
# had. Entries deleted by a client that read them don't count as missing.
APPEND = f"""{_TOLD}
local function is_whole(key, count)
  local length = redis.call('XLEN', key)
  if length >= count then return true end
  local info = redis.pcall('XINFO', 'STREAM', key)
  if info.err then return false end
  for i = 1, #info, 2 do
    if info[i] == 'entries-added' and info[i + 1] < count then return false end
  end
  if length == 0 then return true end
  local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1][1]
  return tonumber(string.match(first, '-(%d+)$')) + length == count + 1
end
local number = tonumber(ARGV[2])
if ARGV[3] == '1' and not is_whole(KEYS[1], number - 1) then
  return redis.error_reply('GAP entries are missing')
end
for i = 6, #ARGV do
  local id = string.format('%s-%.0f', ARGV[1], number)
  local reply = redis.pcall('XADD', KEYS[1], id, 'json', ARGV[i])
  if type(reply) == 'table' and reply.err then return reply end
  number = number + 1
end
if ARGV[3] == '1' then
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  if KEYS[2] then tell(KEYS[2], KEYS[3], ARGV[4], ARGV[5], ARGV[#ARGV]) end
end
return number
"""

# With the request's own stream as the third key, tell only if that stream ends with this message: a
# server after a failover may lack it, and then needs it first.
TELL = f"""{_TOLD}
if KEYS[3] and redis.call('EXISTS', KEYS[2]) == 0 then
  local found = redis.pcall('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
  local last = not found.err and found[1]
  if not last or last[2][2] ~= ARGV[3] then return 0 end
end
return tell(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3])
"""

# Write a terminal message in place of all output. Returns the entry that ends the stream, or false
# if output has begun. An empty message only reads.
ANSWER = f"""{_TOLD}
if redis.call('EXISTS', KEYS[1]) == 1 then
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
  return last[1] and last[1][2][2]
end
if ARGV[4] == '' then return false end
local reply = redis.pcall('XADD', KEYS[1], ARGV[1] .. '-1', 'json', ARGV[4])
if type(reply) == 'table' and reply.err then return reply end
redis.call('EXPIRE', KEYS[1], ARGV[2])
if KEYS[2] then tell(KEYS[2], KEYS[3], ARGV[2], ARGV[3], ARGV[4]) end
return ARGV[4]
"""

# Return the entries from an id on, the last entry, and the stream's last generated id.
LOOK = """
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
if info.err then return false end
local last
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then last = info[i + 1] end
end
return {
  redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2]),
  redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1),
  last,
}
"""

# Raise the stream's last id to `<epoch>-0` by an entry that no reader sees, so that older epochs
# can no longer write. (XSETID requires an existing stream.) It doesn't count as one that was added;
# a user without the right to XSETID has to do without that. A stream with missing entries, after a
# restart with old data, starts over unless it has ended.
FENCE = """
local entries, whole, added = redis.call('XRANGE', KEYS[1], '-', '+'), true, 0
for i, entry in ipairs(entries) do
  whole = whole and tonumber(string.match(entry[1], '-(%d+)$')) == i
end
if not whole and not string.find(entries[#entries][2][2], '"type":"completion"', 1, true) then
  redis.call('DEL', KEYS[1])
  entries = {}
end
local info = redis.pcall('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'entries-added' then added = info[i + 1] end
end
local fence = ARGV[1] .. '-0'
local reply = redis.pcall('XADD', KEYS[1], fence, 'fence', '')
if type(reply) == 'string' then
  redis.call('XDEL', KEYS[1], fence)
  redis.pcall('XSETID', KEYS[1], fence, 'ENTRIESADDED', added)
elseif not string.find(reply.err, 'equal or smaller', 1, true) then
  return reply
end
return entries
"""
