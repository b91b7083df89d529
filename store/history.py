"""The minutes of a day, for the charts of gateways that start anew."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Command, Records
from .redis.keys import Keys

DAY_S = 86_400


class MinuteRecord:
    """A value for each minute of the last day, as a hash. Of several gateways the last one counts:
    all of them write about the same pipeline.
    """

    def __init__(self, keys: Keys, records: Records) -> None:
        self._key = keys.history
        self._records = records

    async def read(self) -> dict[int, bytes]:
        """Return the values by minute, in milliseconds of wall clock.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """
        found = await self._records.run("HGETALL", self._key)
        return {at: found[b"%d" % at] for at in sorted(map(int, filter(bytes.isdigit, found)))}

    async def write(self, at_ms: int, value: bytes, dropped: Sequence[int]) -> None:
        """Set a minute's value, and drop these minutes. Raises as `read`."""
        commands: list[Command] = [
            ("HSET", self._key, at_ms, value),
            ("EXPIRE", self._key, DAY_S),
        ]
        if dropped:
            commands.append(("HDEL", self._key, *dropped))
        await self._records.run_all(commands)
