"""Prompts of forks in flight, so that a fork goes on after a failure though its parent is gone."""

from __future__ import annotations

from collections.abc import Collection

from .records import Records
from .redis.keys import Keys


class ForkStore:
    """The prompt of each fork, found once, by the key of its entry.

    Methods wait while the transport is unreachable.

    Raises:
        ChannelClosed: The bus was closed.
    """

    def __init__(self, keys: Keys, records: Records) -> None:
        self._keys, self._records = keys, records

    async def find(self, entry: str, for_s: int) -> bytes | None:
        """Return a prompt, and keep it for so long; None if there is none."""
        key = self._keys.fork(entry)
        found, _ = await self._run([("GET", key), ("EXPIRE", key, for_s)])
        return bytes(found) if found is not None else None

    async def put(self, entry: str, prompt: bytes, for_s: int) -> bytes:
        """Keep a prompt for so long, unless there is one already; return the one that is kept."""
        command = ("SET", self._keys.fork(entry), prompt, "NX", "GET", "EX", for_s)
        (before,) = await self._run([command])
        return prompt if before is None else bytes(before)

    async def renew(self, entries: Collection[str], for_s: int) -> None:
        """Keep prompts for so long from now on."""
        await self._run([("EXPIRE", self._keys.fork(entry), for_s) for entry in entries])

    async def remove(self, entry: str) -> None:
        """Remove a prompt."""
        await self._run([("DEL", self._keys.fork(entry))])

    async def _run(self, commands: list[tuple[object, ...]]) -> list[bytes | None]:
        replies: list[bytes | None] = await self._records.retry_all("forks", commands)
        return replies
