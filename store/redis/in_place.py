"""Records of a lane's weights and adapters on Redis: one key each."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from .client import Commands, readable

T = TypeVar("T")


class RedisRecord(Generic[T]):
    """`InPlaceRecord` of a lane as one key, which outlives the lane's processes."""

    def __init__(self, key: bytes, kind: type[T], commands: Commands) -> None:
        self._key = key
        self._kind = kind
        self._commands = commands

    async def put(self, last: T) -> None:
        await self._commands.run("SET", self._key, msgspec.json.encode(last))

    async def read(self) -> T | None:
        raw = await self._commands.retry("in place", "GET", self._key)
        decode = msgspec.json.Decoder(self._kind).decode
        return None if raw is None else readable(decode, raw, self._key.decode())
