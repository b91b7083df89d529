"""The service that each lane has given to its tenants, for fairness over all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class LaneService(msgspec.Struct, frozen=True, array_like=True):
    """A lane's table of service, which only the lane itself writes.

    Amounts are totals since the table's beginning, so that reading a table twice, or missing one,
    changes no sum. A lane that restarts begins a new table, which supersedes the older one.

    Attributes:
        lane: The writer.
        epoch: In which the table began.
        number: Of the table within the epoch.
        served: (priority, tenant, service); service is not divided by the tenant's weight.
    """

    lane: str
    epoch: int
    number: int
    served: tuple[tuple[int, str, float], ...] = ()

    @property
    def generation(self) -> tuple[int, int]:
        """Which table of the lane this is; a later one is larger."""
        return self.epoch, self.number


class ServiceRecord(Protocol):
    """The last table of each lane that serves the same model."""

    async def exchange(self, own: LaneService | None) -> list[LaneService]:
        """Replace the lane's table, in one round trip, and return the tables as they were before.

        Args:
            own: None: only read.

        Raises:
            BusError: The transport can't be reached, or was closed. The table may be replaced.
        """

    async def forget(self, lanes: Sequence[str]) -> None:
        """Remove the tables of these lanes. Raises as `exchange`."""


class MemoryService:
    """`ServiceRecord` within one process."""

    def __init__(self) -> None:
        self._tables: dict[str, LaneService] = {}

    async def exchange(self, own: LaneService | None) -> list[LaneService]:
        before = list(self._tables.values())
        if own is not None:
            self._tables[own.lane] = own
        return before

    async def forget(self, lanes: Sequence[str]) -> None:
        for lane in lanes:
            self._tables.pop(lane, None)
