"""The scripts by which results are written, each a single step for whoever else writes or reads."""

from __future__ import annotations

# The results stream gets the terminal message of an entry once, however often this is repeated. The
# mark comes last: when there is no memory for the message, there is none.
_TOLD = """
local function tell(results, told, ttl, maxlen, raw)
  if redis.call('EXISTS', told) == 1 then return 0 end
  local reply = redis.pcall('XADD', results, 'MAXLEN', '~', maxlen, '*', 'json', raw)
  if type(reply) == 'table' and reply.err then return reply end
  redis.call('SET', told, '', 'EX', ttl)
  return 1
end
"""

# Several entries, or a terminal one with all that belongs to it: whole or not at all, so that
# neither a lost reply nor a second writer can leave a part. `pcall` gives back Redis's own error.
# Where there is one server, the results stream gets the terminal message in the same step: the two
# commands could reach two servers when one takes the other's place.
#
# A stream of which entries are missing is not ended: the server has taken another's place and lacks
# what that had got. It does not look like one whose reader has removed what he has read.
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

# With the request's own stream as the third key, only if that ends with this message: a server that
# has taken another's place may lack it, and then has to be given it first.
TELL = f"""{_TOLD}
if KEYS[3] and redis.call('EXISTS', KEYS[2]) == 0 then
  local found = redis.pcall('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
  local last = not found.err and found[1]
  if not last or last[2][2] ~= ARGV[3] then return 0 end
end
return tell(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3])
"""

# A terminal message instead of all output. Replies with what ends the stream, or nothing when
# somebody has begun to write to it. An empty message only looks.
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

# What a stream holds: entries from a number on, the last one, the last id that it ever had.
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

# Raises the stream's last id to `<epoch>-0`, below which nobody can write any more, by an entry
# that no reader sees; XSETID would do the same but not for a stream that does not exist yet.
# A stream from which entries are missing, since the server was restarted with old data, begins
# anew, unless it has ended.
FENCE = """
local entries, whole = redis.call('XRANGE', KEYS[1], '-', '+'), true
for i, entry in ipairs(entries) do
  whole = whole and tonumber(string.match(entry[1], '-(%d+)$')) == i
end
if not whole and not string.find(entries[#entries][2][2], '"type":"completion"', 1, true) then
  redis.call('DEL', KEYS[1])
  entries = {}
end
local fence = ARGV[1] .. '-0'
local reply = redis.pcall('XADD', KEYS[1], fence, 'fence', '')
if type(reply) == 'string' then
  redis.call('XDEL', KEYS[1], fence)
elseif not string.find(reply.err, 'equal or smaller', 1, true) then
  return reply
end
return entries
"""
