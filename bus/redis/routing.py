"""Routing on Redis: entries move from the deployment's requests stream to their models' streams.

Entry ids are unique across models, so all are assigned on the deployment's stream. A stream accepts
only ids above its last one; that holds because entries are moved in order, and requests keep
theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ...config import BusConfig, BusError, shown
from ...config.errors import bus_closed
from ...store.redis.client import Commands, end_tasks, execute, persist
from ...store.redis.keys import JSON, MODEL, MSGPACK, Keys
from ...store.registry import NOT_LOADED
from ..codec import decode_model
from ..entries import MAX_FIELDS
from ..routing import Refusal, Unmoved, Unrouted
from .entries import IS_SAME, ServerClock, digest_of, model_of, read_entries
from .refusals import end_untaken
from .results import RedisResults

BLOCK_S = 5.0

# Publish directly to a loaded model. The id is assigned on the deployment's stream; while others
# wait there, the request is queued after them.
PUBLISH = """
local closed = redis.call('HGET', KEYS[3], ARGV[1])
if closed then return redis.error_reply('CLOSED ' .. closed) end
local add = {'XADD', KEYS[1], '*'}
local direct = redis.call('XLEN', KEYS[1]) == 0
if direct then
  local id = redis.call('XADD', KEYS[1], '*', 'taken', '')
  redis.call('XDEL', KEYS[1], id)
  add = {'XADD', KEYS[2], id}
end
for i = 2, #ARGV do add[#add + 1] = ARGV[i] end
return redis.call(unpack(add))
"""

# Entries moved by another process meanwhile are gone, or their ids are other entries'. An id not
# above the target's last one is left (another process may have written there), and so is an entry
# with more fields than Lua can unpack; neither may block the rest.
_MOVE = """IS_SAME
local left = {}
for i = 1, #ARGV, 3 do
  local found = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
  if found[1] and is_same(KEYS[1], ARGV[i], ARGV[i + 2]) then
    if redis.call('HEXISTS', KEYS[2], ARGV[i + 1]) == 1 then
      left[#left + 1] = {ARGV[i], 'model_not_loaded'}
    elseif #found[1][2] > 2 * MAX_FIELDS then
      left[#left + 1] = {ARGV[i], 'malformed'}
    else
      local added = redis.pcall('XADD', KEYS[3 + (i - 1) / 3], ARGV[i], unpack(found[1][2]))
      if type(added) ~= 'table' or not added.err then
        redis.call('XDEL', KEYS[1], ARGV[i])
      elseif string.find(added.err, 'equal or smaller') then
        left[#left + 1] = {ARGV[i], 'not_routed'}
      else
        return added
      end
    end
  end
end
return left
""".replace("MAX_FIELDS", str(MAX_FIELDS)).replace("IS_SAME", IS_SAME)


_DROP = f"""{IS_SAME}
for i = 1, #ARGV, 2 do
  if is_same(KEYS[1], ARGV[i], ARGV[i + 1]) then redis.call('XDEL', KEYS[1], ARGV[i]) end
end
"""


class RedisRouting:
    """`RequestRouting` of a deployment on Redis."""

    def __init__(
        self, config: BusConfig, keys: Keys, commands: Commands, results: RedisResults
    ) -> None:
        self._config = config
        self._keys = keys
        self._commands = commands
        self._results = results
        self._redis = commands.server.client(BLOCK_S)
        self._closed = False
        # Of the entries that `unrouted` has returned last.
        self._digests: dict[str, str] = {}
        self._reading: asyncio.Task[Any] | None = None

    async def unrouted(self, max_items: int = 64) -> list[Unrouted]:
        key = self._keys.entrance
        # From the beginning: moved entries are gone.
        command = ("XREAD", "COUNT", max_items, "BLOCK", int(BLOCK_S * 1000), "STREAMS", key, "0")

        async def attempt() -> Any:
            return await execute(self._redis, *command, key=key)

        while not self._closed:
            # A task of its own, so that closing doesn't wait for the server's reply.
            reading = self._reading = asyncio.create_task(
                persist(self._commands.server, "entrance", attempt), name="entrance"
            )
            try:
                await asyncio.wait({reading})
            finally:
                reading.cancel()
            if not reading.cancelled() and (entries := (reading.result() or {}).get(key, [])):
                self._digests = {id.decode(): digest_of(fields) for id, fields in entries}
                return [_unrouted(*entry) for entry in entries]
        raise bus_closed()

    async def move(self, places: Sequence[tuple[str, str]]) -> list[Unmoved]:
        keys = self._keys
        targets = [keys.requests_of(model) for _, model in places]
        named = [keys.entrance, keys.closed, *targets]
        about = [each for id, model in places for each in (id, model, self._digests.get(id, ""))]
        left = await self._commands.retry("entrance", "EVAL", _MOVE, len(named), *named, *about)
        return [Unmoved(entry_id.decode(), code.decode()) for entry_id, code in left]

    async def refuse(self, entry_ids: Sequence[str], answer: Refusal, epoch: int) -> None:
        redis, key = self._commands.redis, self._keys.entrance
        ranges = [("XRANGE", key, each, each) for each in entry_ids]
        raw = [entry for entries in await self._commands.run_all(ranges) for entry in entries]
        entries = await self._commands.once(
            lambda: read_entries(redis, key, raw, self._config.max_request_bytes, ServerClock())
        )
        seen = self._digests
        same = [each for each in entries if seen.get(each.entry_id, each.digest) == each.digest]
        refusals = [refusal for each in same if (refusal := answer(each)) is not None]
        if ended := await end_untaken(self._results, refusals, epoch, claimed_too=True):
            digests = {each.entry_id: each.digest for each in same}
            about = chain.from_iterable((id, digests[id]) for id in ended)
            await self._commands.run("EVAL", _DROP, 1, key, *about)

    async def aclose(self) -> None:
        self._closed = True
        if self._reading is not None:
            await end_tasks({self._reading})
        await self._redis.aclose()


def _unrouted(entry_id: bytes, fields: dict[bytes, bytes]) -> Unrouted:
    if MODEL in fields:
        return Unrouted(entry_id.decode(), model_of(fields))
    encoding = next((name for name in (JSON, MSGPACK) if name in fields), None)
    if encoding is None:
        return Unrouted(entry_id.decode(), "")
    return Unrouted(
        entry_id.decode(), decode_model(fields[encoding], "json" if encoding == JSON else "msgpack")
    )


def explain_closed(error: BusError, model: str) -> BusError:
    """Convert the error of `PUBLISH` for the caller who named the model."""
    _, closed, state = str(error).partition("CLOSED ")
    if not closed:
        return error
    return BusError(
        f"the model {shown(model)} takes no requests: it is {state}; load it, or ask for another",
        code=NOT_LOADED,
    )
