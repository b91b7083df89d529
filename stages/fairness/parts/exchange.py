"""Shares of tenants over several lanes: each lane publishes its service and counts the others'.

docs/fairness.md, "Several lanes", has the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....config import FairnessConfig
from ....store.service import LaneService
from ..state import FairnessState
from . import Part

LEAD_INTERVALS = 16
"""A tenant's lead because of other lanes counts up to this lane's own service of so many intervals.
Less than one would let a tenant that is ahead have its turn between two exchanges; more only
lengthens the wait of a tenant that was served elsewhere, while it was not in competition here."""

FADE = 0.95
"""Share of the measured speed that remains after an interval of less."""

ENTRIES_KEPT = 1024
"""Entries of a table that have not changed for some time. Then a new table begins."""

SILENT_EXCHANGES = 1200
"""Exchanges without a change after which a lane's table is removed: at half a second, ten minutes.
A lane that is only idle writes its table again when it has served."""

Entry = tuple[int, str]
"""(priority, tenant)."""


@dataclass(slots=True)
class _Known:
    """The last table of another lane."""

    generation: tuple[int, int]
    served: dict[Entry, float]
    silent: int = 0


class Exchange(Part):
    """This lane's table of service, and the last seen tables of the others.

    Attributes:
        on: Whether service is recorded.
        total: Service of this lane since the exchange was turned on.
        elsewhere: Service of the other lanes, as far as it is known.
        capped: Times that a tenant's lead was cut to `lead`.
        lead: The most that service elsewhere puts a tenant of weight 1 ahead.
    """

    def __init__(self, core: FairnessState, lane: str = "0") -> None:
        super().__init__(core)
        self.lane = lane
        self._epoch = self._number = 0
        self._clear(on=bool(core.config.exchange_interval_s))

    def _clear(self, *, on: bool) -> None:
        self.on = on
        self.total = self.elsewhere = 0.0
        self.capped = 0
        self.lead = 0.0
        self._served: dict[Entry, float] = {}
        self._known: dict[str, _Known] = {}
        # As in the last report; and its difference to the one before.
        self._reported: dict[Entry, float] = {}
        self._changed = 0
        self._reported_total = 0.0
        self._speed = 0.0
        self._replaced = False

    def reset(self, epoch: int) -> None:
        self.begin(epoch)
        self.core.queue.exchange = self

    def configure(self, config: FairnessConfig) -> None:
        self.switch(bool(config.exchange_interval_s))

    def report_service(self, elapsed_s: float) -> LaneService | None:
        """Return this lane's service for the other lanes, as `report`."""
        for replica in self.core.replicas.values():
            self.core.count(replica)
        return self.report(elapsed_s, self.core.config.exchange_interval_s)

    def apply_service(self, tables: Iterable[LaneService]) -> list[str]:
        """Count the other lanes' service since the last call; return lanes long silent."""
        self.core.queue.serve_elsewhere(self.news(tables))
        return self.silent()

    @property
    def num_lanes(self) -> int:
        """Other lanes whose tables are known."""
        return len(self._known)

    def switch(self, on: bool) -> None:
        """Turn the exchange on or off. What was seen before is forgotten."""
        if on != self.on:
            self._number += 1
            self._clear(on=on)

    def begin(self, epoch: int) -> None:
        """Begin a new table: the lane has lost its requests and counters.

        The other lanes' tables stay known: only what they serve from now on counts.
        """
        if epoch != self._epoch:
            self._epoch, self._number = epoch, 0
            self._served, self._reported = {}, {}
            self._replaced = False

    def record(self, priority: int, tenant: str, cost: float) -> None:
        """Add service of this lane; a refund is below zero."""
        entry = (priority, tenant)
        self._served[entry] = self._served.get(entry, 0.0) + cost
        self.total += cost

    def report(self, elapsed_s: float, interval_s: float) -> LaneService | None:
        """Return this lane's table, for the exchange; None if a successor of the lane writes it.

        Args:
            elapsed_s: Since the last report.
            interval_s: Between two exchanges.
        """
        speed = (self.total - self._reported_total) / max(elapsed_s, interval_s)
        self._speed = max(speed, self._speed * FADE)
        self.lead = LEAD_INTERVALS * interval_s * self._speed
        self._reported_total = self.total
        before, self._reported = self._reported, dict(self._served)
        self._changed = sum(before.get(entry) != cost for entry, cost in self._served.items())
        if self._replaced or not self._epoch:
            return None
        served = tuple((*entry, cost) for entry, cost in self._reported.items())
        return LaneService(self.lane, self._epoch, self._number, served)

    def news(self, tables: Iterable[LaneService]) -> list[tuple[int, str, float]]:
        """Return what other lanes have served since the last call, as (priority, tenant, service).

        Call it only after a successful exchange of the last report. The first table of a lane is
        its beginning: what the lane served before is not counted.
        """
        news: list[tuple[int, str, float]] = []
        seen = set()
        for table in tables:
            if table.lane == self.lane:
                self._replaced = table.epoch > self._epoch
                continue
            seen.add(table.lane)
            known = self._known.get(table.lane)
            if known is not None and table.generation < known.generation:
                continue  # of a process that the lane's present one has replaced
            served = {(priority, tenant): cost for priority, tenant, cost in table.served}
            if known is None:
                self._known[table.lane] = _Known(table.generation, served)
                continue
            same = known.generation == table.generation
            known.silent = known.silent + 1 if same and served == known.served else 0
            before = known.served if same else {}
            known.generation, known.served = table.generation, served
            for entry, cost in served.items():
                if gained := cost - before.get(entry, 0.0):
                    self.elsewhere += gained
                    news.append((*entry, gained))
        # A table that is missing, as after a loss of the server's data, stays known.
        for lane in [lane for lane in self._known if lane not in seen]:
            self._known[lane].silent += 1
        self._renew()
        return news

    def silent(self) -> list[str]:
        """Forget the lanes that have not changed for long, and return them."""
        lanes = [lane for lane, each in self._known.items() if each.silent > SILENT_EXCHANGES]
        for lane in lanes:
            del self._known[lane]
        return lanes

    def _renew(self) -> None:
        """Begin a new table without the old entries, since they have been read."""
        if len(self._reported) <= ENTRIES_KEPT + 2 * self._changed:
            return
        reported, self._reported = self._reported, {}
        self._number += 1
        left = ((entry, cost - reported.get(entry, 0.0)) for entry, cost in self._served.items())
        self._served = {entry: cost for entry, cost in left if cost}
