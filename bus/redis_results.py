"""Writing results to Redis: one stream per request, and one with every terminal message.

Entries of a request's stream have explicit ids `1-0`, `2-0` and so on. Redis refuses an id that is
not above the last one, so a repeated write can't double anything, and two writers can't mix.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import exceptions

from ..config import BusConfig
from .codec import decode_output, encode_output
from .keys import JSON, Keys, parse_id
from .messages import Completion, Output
from .redis_client import Backoff, Commands, Server, execute, is_transient, log, persist
from .redis_follow import RedisFollow, RedisTail, StreamReader

REMEMBERED_STREAMS = 65_536
"""Streams of which the next number is remembered. For any other, Redis is asked."""

KEYS_PER_FLUSH = 256

# Several entries, or a terminal one with all that belongs to it: whole or not at all, so that
# neither a lost reply nor a second writer can leave a part. `pcall` gives back Redis's own error.
_APPEND = """
local number = tonumber(ARGV[1])
for i = 5, #ARGV do
  local reply = redis.pcall('XADD', KEYS[1], string.format('%.0f-0', number), 'json', ARGV[i])
  if type(reply) == 'table' and reply.err then return reply end
  number = number + 1
end
if ARGV[2] == '1' then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'json', ARGV[#ARGV])
end
return number
"""


class _Part(NamedTuple):
    """What is still to be written to one stream."""

    payloads: list[bytes]
    ends: bool


class RedisResults:
    """See `ResultStreams`."""

    def __init__(self, config: BusConfig, keys: Keys, server: Server, commands: Commands) -> None:
        self._config = config
        self._keys = keys
        self._server = server
        self._commands = commands
        self._reader = StreamReader(keys, server, commands)
        self._next: OrderedDict[str, int] = OrderedDict()
        self._writing = asyncio.Lock()

    async def deliver(self, batch: Sequence[tuple[str, Sequence[Output]]]) -> None:
        """See `ResultStreams.deliver`."""
        parts: dict[str, _Part] = {}
        for key, outputs in batch:
            payloads, ends = parts.get(key, _Part([], False))
            for output in outputs:
                if not ends:
                    payloads.append(encode_output(output))
                    ends = isinstance(output, Completion)
            parts[key] = _Part(payloads, ends)
        await self._commands.shielded(self._deliver(parts))

    async def exists(self, key: str) -> bool:
        """See `ResultStreams.exists`."""
        redis, out = self._commands.redis, self._keys.out(key)
        return bool(
            await self._commands.idempotent("exists", lambda: execute(redis, "EXISTS", out))
        )

    def follow(self, request_id: str, entry_id: str) -> RedisFollow:
        """See `ResultStreams.follow`."""
        return RedisFollow(self._reader, self._keys, self._commands, request_id, entry_id)

    async def tail(self) -> RedisTail:
        """See `ResultStreams.tail`."""
        redis, key = self._commands.redis, self._keys.results
        last = await self._commands.idempotent(
            "tail", lambda: execute(redis, "XREVRANGE", key, "+", "-", "COUNT", 1)
        )
        return RedisTail(self._reader.subscribe({key: last[0][0] if last else b"0-0"}))

    async def aclose(self) -> None:
        """Ends all who follow or tail."""
        await self._reader.aclose()

    async def _deliver(self, parts: dict[str, _Part]) -> None:
        async with self._writing:
            backoff = Backoff()
            left = [(key, part) for key, part in parts.items() if part.payloads]
            while left:
                now, left = left[:KEYS_PER_FLUSH], left[KEYS_PER_FLUSH:]
                again = await self._flush(now)
                if again:
                    await backoff.wait()
                else:
                    backoff.reset()
                left = again + left

    async def _flush(self, parts: list[tuple[str, _Part]]) -> list[tuple[str, _Part]]:
        """Writes to many streams in one round trip; returns what has to be tried again."""

        async def attempt() -> list[Any]:
            pipeline = self._commands.redis.pipeline(transaction=False)
            for key, part in parts:
                pipeline.execute_command(*self._command(key, part))
            return list(await pipeline.execute(raise_on_error=False))

        again: list[tuple[str, _Part]] = []
        replies = await persist(self._server, "results", attempt)
        for (key, part), reply in zip(parts, replies, strict=True):
            if not isinstance(reply, Exception):
                self._note(key, self._next.get(key, 1) + len(part.payloads), part.ends)
            elif "equal or smaller" in str(reply):
                rest = await self._resolve(key, part)
                if rest.payloads:
                    again.append((key, rest))
            elif is_transient(reply):
                again.append((key, part))
            else:
                log.error("bus.output_refused", key=key, error=str(reply))
        return again

    def _command(self, key: str, part: _Part) -> list[Any]:
        number, out = self._next.get(key, 1), self._keys.out(key)
        if len(part.payloads) == 1 and not part.ends:
            return ["XADD", out, f"{number}-0", JSON, part.payloads[0]]
        return [
            *("EVAL", _APPEND, 2, out, self._keys.results),
            *(number, int(part.ends), self._config.results_ttl_s, self._config.results_maxlen),
            *part.payloads,
        ]

    def _note(self, key: str, number: int, ended: bool) -> None:
        """Remembers the next number of a stream; forgets a stream that has ended."""
        if ended:
            self._next.pop(key, None)
            return
        self._next[key] = number
        self._next.move_to_end(key)
        if len(self._next) > REMEMBERED_STREAMS:
            self._next.popitem(last=False)

    async def _resolve(self, key: str, part: _Part) -> _Part:
        """After a refused id: what still has to be written, behind what the stream holds.

        The number was taken by ourselves (an earlier process, or a write of which the reply got
        lost: then the entries are equal) or by another writer. After a terminal message nothing
        is written any more.
        """
        out, number = self._keys.out(key), self._next.get(key, 1)

        async def attempt() -> list[Any]:
            pipeline = self._commands.redis.pipeline(transaction=True)
            pipeline.execute_command("XRANGE", out, f"{number}-0", "+", "COUNT", len(part.payloads))
            pipeline.execute_command("XREVRANGE", out, "+", "-", "COUNT", 1)
            pipeline.execute_command("XINFO", "STREAM", out)
            return list(await pipeline.execute(raise_on_error=False))

        taken, tail, info = await persist(self._server, "results", attempt)
        if isinstance(info, exceptions.ResponseError):  # expired in between
            self._next.pop(key, None)
            return part
        if tail and _is_terminal(tail[0][1].get(JSON, b"")):
            self._next.pop(key, None)
            return _Part([], False)
        equal = 0
        while equal < len(taken) and taken[equal][1].get(JSON) == part.payloads[equal]:
            equal += 1
        self._note(key, parse_id(info[b"last-generated-id"])[0] + 1, ended=False)
        return _Part(part.payloads[equal:], part.ends)


def _is_terminal(raw: bytes) -> bool:
    try:
        return isinstance(decode_output(raw), Completion)
    except (ValueError, RecursionError):
        return False
