"""Replies to control messages on Redis: one short list per operation."""

from __future__ import annotations

import asyncio
import time

import msgspec

from ...store.redis.client import Commands
from ...store.redis.keys import Keys
from ..replies import KEPT_S, Outcome

_FIRST_LOOK_S = 0.002
_LONGEST_WAIT_S = 0.1


class RedisReplies:
    """`Replies` as one expiring Redis list per operation.

    Callers poll, since operations are rare and slow.
    """

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._keys = keys
        self._commands = commands

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        if not operation_id:
            return
        key = self._keys.reply(operation_id)
        commands = [("RPUSH", key, msgspec.json.encode(outcome)), ("EXPIRE", key, KEPT_S)]
        await self._commands.run_all(commands)

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        key = self._keys.reply(operation_id)
        end, wait_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        while True:
            raw = await self._commands.run("LRANGE", key, 0, -1)
            left_s = end - time.monotonic()
            if len(raw) >= number or left_s <= 0:
                return [msgspec.json.decode(answer, type=Outcome) for answer in raw]
            await asyncio.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
