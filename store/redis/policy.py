"""The policy document on Redis: a hash of the document and its version.

Replaced in a transaction, not a script, so that a gateway needs no right to run scripts.
"""

from __future__ import annotations

from redis import exceptions

from ..policy import NOTHING, PolicyState, new_version
from .client import Commands
from .keys import Keys

_VERSION, _DOCUMENT = b"version", b"document"


class RedisPolicyRecord:
    """`PolicyRecord` of all gateways under one prefix."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._key = keys.policy
        self._commands = commands

    async def read(self, known: str) -> PolicyState | None:
        version = await self._commands.run("HGET", self._key, _VERSION)
        if (version or b"").decode() == known:
            return None
        version, document = await self._commands.run("HMGET", self._key, _VERSION, _DOCUMENT)
        return NOTHING if version is None else PolicyState(version.decode(), document)

    async def replace(self, known: str, document: bytes) -> bool:
        return await self._commands.once(lambda: self._replace(known, document))

    async def _replace(self, known: str, document: bytes) -> bool:
        async with self._commands.redis.pipeline(transaction=True) as pipeline:
            await pipeline.watch(self._key)
            version = await pipeline.hget(self._key, _VERSION)
            if (version or b"") != known.encode():
                return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(self._key, mapping={_VERSION: new_version(), _DOCUMENT: document})
            try:
                await pipeline.execute()
            except exceptions.WatchError:
                return False
        return True
