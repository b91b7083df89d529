"""The lanes' tables of service on Redis: a hash, with a field for each lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..service import LaneService
from .client import Commands, readable
from .keys import Keys

KEPT_S = 3600
"""Time after which the tables expire if no lane exchanges any more."""

_decode = msgspec.msgpack.Decoder(LaneService).decode


class RedisService:
    """`ServiceRecord` of all lanes of one model."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._key = keys.service
        self._commands = commands

    async def exchange(self, own: LaneService | None) -> list[LaneService]:
        commands: list[tuple[Any, ...]] = [("HGETALL", self._key)]
        if own is not None:
            commands.append(("HSET", self._key, own.lane, msgspec.msgpack.encode(own)))
            commands.append(("EXPIRE", self._key, KEPT_S))
        found = (await self._commands.run_all(commands))[0]
        tables = (readable(_decode, raw, self._key.decode()) for raw in found.values())
        return [table for table in tables if table is not None]

    async def forget(self, lanes: Sequence[str]) -> None:
        if lanes:
            await self._commands.run("HDEL", self._key, *lanes)
