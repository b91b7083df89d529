"""Points of the console's charts: ten minutes by the second; a day by the minute, on the bus."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ...config import BusError, split_role
from ...config.logger import get_logger
from ...pipeline.status import PipelineStatus
from ...store.history import MinuteRecord
from ...store.records import readable

SECONDS = 600
"""Points by the second: ten minutes."""

MINUTES = 1440
"""Points by the minute: a day."""

_MINUTE_MS = 60_000


class Point(msgspec.Struct, array_like=True):
    """The numbers of a pipeline at one moment, or their means over a minute; None if unknown.

    Attributes:
        at_ms: Wall clock; of a minute its beginning.
        tokens_per_s: Tokens per second of all lanes.
        in_flight: Requests that a lane has taken and not yet answered.
        not_started: Requests of which no sample has begun, taken or not.
        running: Sequences in the batches.
        kv_used: KV blocks in use.
        kv_total: All KV blocks.
        weights: The newest version of weights; of a minute the last one.
    """

    at_ms: int
    tokens_per_s: float | None = None
    in_flight: float | None = None
    not_started: float | None = None
    running: float | None = None
    kv_used: float | None = None
    kv_total: float | None = None
    weights: float | None = None


class History:
    """The last points, bounded. Without a status there is a point without numbers: a gap."""

    def __init__(self, seconds: int = SECONDS, minutes: int = MINUTES) -> None:
        self.seconds: deque[Point] = deque(maxlen=seconds)
        self._minutes: deque[Point] = deque(maxlen=minutes)
        self._minute: list[Point] = []

    def add(self, point: Point) -> Point | None:
        """Add the next second's point; return the minute that it has completed."""
        whole = None
        if self._minute and self._minute[0].at_ms // _MINUTE_MS != point.at_ms // _MINUTE_MS:
            whole = _mean(self._minute)
            self._minutes.append(whole)
            self._minute.clear()
        self._minute.append(point)
        self.seconds.append(point)
        return whole

    def precede(self, minutes: Iterable[Point]) -> None:
        """Put minutes before the first one."""
        own = self.minutes
        earlier = [each for each in minutes if not own or each.at_ms < own[0].at_ms]
        self._minutes = deque([*earlier, *self._minutes], maxlen=self._minutes.maxlen)

    @property
    def minutes(self) -> list[Point]:
        """The points by the minute; the last one has the minute so far."""
        return [*self._minutes, *([_mean(self._minute)] if self._minute else [])]


class RecordedHistory(History):
    """A history whose minutes outlive the gateway, where its bus does."""

    def __init__(self, record: MinuteRecord) -> None:
        super().__init__()
        self._record = record
        self._recorded: dict[int, bytes] | None = None
        self._failed = False

    async def keep(self, point: Point) -> None:
        """Add the next second's point, and record the minute that it has completed. A failure is
        logged once, and the charts then have the minutes of this process."""
        whole = self.add(point)
        try:
            if self._recorded is None:
                await self._read(point.at_ms)
            if whole is not None:
                await self._write(whole)
        except BusError as error:
            if not self._failed and point.tokens_per_s is not None:
                get_logger().warning("console.history_not_recorded", reason=error.message)
                self._failed = True

    async def _read(self, now_ms: int) -> None:
        self._recorded = await self._record.read()
        points = [readable(_decode, raw, "history") for raw in self._recorded.values()]
        oldest = now_ms - MINUTES * _MINUTE_MS
        self.precede(each for each in points if each is not None and each.at_ms > oldest)

    async def _write(self, whole: Point) -> None:
        oldest = whole.at_ms - MINUTES * _MINUTE_MS
        recorded = self._recorded or {}
        dropped = [each for each in recorded if each <= oldest]
        await self._record.write(whole.at_ms, _encode(whole), dropped)
        recorded[whole.at_ms] = b""
        for each in dropped:
            del recorded[each]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Point).decode


def point_of(at_ms: int, status: PipelineStatus | None) -> Point:
    """Return the point of a status; None if the bus can't be reached."""
    if status is None:
        return Point(at_ms)
    totals = dict.fromkeys(("tokens_per_s", "running", "kv_free", "kv_total"), 0.0)
    weights = 0.0
    for lane in status.lanes:
        for role, report in lane.stages.items():
            for name in totals:
                if isinstance(value := report.load.get(name, 0), int | float):
                    totals[name] += value
            if split_role(role)[0] == "executor":
                weights = max(weights, float(report.load.get("weight_version", 0) or 0))
    return Point(
        at_ms,
        totals["tokens_per_s"],
        status.in_flight,
        status.queue_length,
        totals["running"],
        totals["kv_total"] - totals["kv_free"],
        totals["kv_total"],
        weights,
    )


def _mean(points: list[Point]) -> Point:
    """Return the means of a minute's points that have numbers."""
    known = [each for each in points if each.tokens_per_s is not None]
    minute = Point(points[0].at_ms // _MINUTE_MS * _MINUTE_MS)
    if not known:
        return minute
    for name in Point.__struct_fields__[1:-1]:
        setattr(minute, name, _rounded(getattr(each, name) for each in known))
    minute.weights = known[-1].weights
    return minute


def _rounded(values: Iterable[float]) -> float:
    """Return a mean with two digits: the page reads a day of them."""
    found = list(values)
    return round(sum(found) / len(found), 2)
