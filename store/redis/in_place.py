"""Records of a lane's weights and adapters on Redis: one key each."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ...config.logger import get_logger
from .client import Commands

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
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=self._kind)
        except (ValueError, RecursionError) as error:
            get_logger().warning(
                "bus.undecodable_entry", stream=self._key.decode(), error=str(error)
            )
            return None
