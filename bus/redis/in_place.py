"""What a lane remembers of its weights, on Redis: one key for each lane."""

from __future__ import annotations

import msgspec

from ..in_place import WeightsInPlace
from ..keys import Keys
from .client import Commands, execute, log


class RedisWeightsRecord:
    """The `WeightsRecord` of a lane as one key, which outlives the lane's processes."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._key = keys.weights
        self._commands = commands

    async def put(self, weights: WeightsInPlace) -> None:
        redis, body = self._commands.redis, msgspec.json.encode(weights)
        await self._commands.once(lambda: execute(redis, "SET", self._key, body))

    async def read(self) -> WeightsInPlace | None:
        redis = self._commands.redis
        get = lambda: execute(redis, "GET", self._key)  # noqa: E731
        raw = await self._commands.idempotent("weights in place", get)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=WeightsInPlace)
        except (ValueError, RecursionError) as error:
            log.warning("bus.undecodable_entry", stream="weights", error=str(error))
            return None
