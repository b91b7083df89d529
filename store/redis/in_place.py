"""What a lane remembers of its weights and adapters, on Redis: a key of each for each lane."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ...config.logger import get_logger
from .client import Commands, execute

T = TypeVar("T")


class RedisRecord(Generic[T]):
    """The `InPlaceRecord` of a lane as one key, which outlives the lane's processes."""

    def __init__(self, key: bytes, kind: type[T], commands: Commands) -> None:
        self._key = key
        self._kind = kind
        self._commands = commands

    async def put(self, last: T) -> None:
        redis, body = self._commands.redis, msgspec.json.encode(last)
        await self._commands.once(lambda: execute(redis, "SET", self._key, body))

    async def read(self) -> T | None:
        redis = self._commands.redis
        get = lambda: execute(redis, "GET", self._key)  # noqa: E731
        raw = await self._commands.idempotent("in place", get)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=self._kind)
        except (ValueError, RecursionError) as error:
            get_logger().warning(
                "bus.undecodable_entry", stream=self._key.decode(), error=str(error)
            )
            return None
