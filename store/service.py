"""The service that each lane has given to its tenants, for fairness over all lanes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .records import Command, Records, readable
from .redis.keys import Keys

KEPT_S = 3600
"""Time after which the tables expire if no lane exchanges any more."""


class LaneService(msgspec.Struct, frozen=True, array_like=True):
    """A lane's table of service, which only the lane itself writes.

    Amounts are totals since the table's beginning, so that reading a table twice, or missing one,
    changes no sum. A lane that restarts begins a new table, which supersedes the older one.

    Attributes:
        lane: The writer.
        epoch: In which the table began.
        number: Number of the table within the epoch.
        served: (priority, tenant, service); service is not divided by the tenant's weight.
    """

    lane: str
    epoch: int
    number: int
    served: tuple[tuple[int, str, float], ...] = ()

    @property
    def generation(self) -> tuple[int, int]:
        """Order of the lane's tables; a later one is larger."""
        return self.epoch, self.number


_decode = msgspec.msgpack.Decoder(LaneService).decode


class ServiceRecord:
    """The last table of each lane that serves the same model, as a hash."""

    def __init__(self, keys: Keys, records: Records) -> None:
        self._key = keys.service
        self._records = records

    async def exchange(self, own: LaneService | None) -> list[LaneService]:
        """Replace the lane's table, in one round trip, and return the tables as they were before.

        Args:
            own: None: only read.

        Raises:
            BusError: The transport can't be reached, or was closed. The table may be replaced.
        """
        commands: list[Command] = [("HGETALL", self._key)]
        if own is not None:
            commands.append(("HSET", self._key, own.lane, msgspec.msgpack.encode(own)))
            commands.append(("EXPIRE", self._key, KEPT_S))
        found = (await self._records.run_all(commands))[0]
        tables = (readable(_decode, raw, self._key.decode()) for raw in found.values())
        return [table for table in tables if table is not None]

    async def forget(self, lanes: Sequence[str]) -> None:
        """Remove the tables of these lanes. Raises as `exchange`."""
        if lanes:
            await self._records.run("HDEL", self._key, *lanes)
