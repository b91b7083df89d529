"""Stage reports of every process, about once a second, for people and probes.

No stage depends on the board, and it holds nothing of a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ..config.logger import get_logger
from .loaded_adapter import LoadedAdapter
from .process_state import ProcessState, state_of
from .records import Records
from .redis.keys import JSON, Keys, parse_id

STALE_AFTER_S = 10.0
"""Age at which a silent stage counts as gone: ten missed reports, since a busy machine may miss a
few."""

# Older entries are trimmed, so that the stream holds a few heartbeats of all processes. Without any
# report the stream expires.
_KEPT_S = 60

StageState = Literal["starting", "waiting", "ready", "draining", "gone"]


class Restarts(msgspec.Struct, frozen=True):
    """Restarts of a stage, with its process or without, since its pipeline was started.

    Attributes:
        count: Their number.
        cause: Why the last one was necessary.
        at_s: When that was, seconds since the Unix epoch.
    """

    count: int = 0
    cause: str = ""
    at_s: float = 0.0

    def after(self, cause: str) -> Restarts:
        """Return the restarts with one that is made now."""
        return Restarts(self.count + 1, cause, round(time.time(), 3))


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one stage of one process.

    Attributes:
        lane: The stage's lane.
        stage: Its role: "executor"; "executor.1" in replica 1.
        incarnation: Id of the stage object; a restart within the process gives a new one.
        host: Host name.
        pid: Process id.
        epoch: The last epoch seen.
        state: "starting" while loading; "waiting" before it joins an epoch; "ready"; "draining"
            while it admits nothing new; "gone" after a clean exit (never returned by `read`).
        reason: The cause of waiting; "" if ready.
        since_s: Seconds in this state.
        load: A few numbers of the stage.
        adapters: Admission only: the adapters that requests to its lane can name.
        age_s: Age of the report by the board's clock.
        model: The lane's model, in a deployment of several.
        process: `identity_of` the process.
        process_state: The process's state if it runs on the reader's machine; set by `read`.
        cpu: Cores that the process has used of late, with all its threads.
        memory_bytes: Its resident memory; 0 where /proc has none.
        restarts: Of the stage.
    """

    lane: str
    stage: str
    incarnation: str
    host: str
    pid: int
    epoch: int
    state: StageState
    reason: str = ""
    since_s: float = 0.0
    load: dict[str, int | float | str] = {}
    age_s: float = 0.0
    adapters: tuple[LoadedAdapter, ...] = ()
    model: str = ""
    process: str = ""
    process_state: ProcessState = "unknown"
    cpu: float = 0.0
    memory_bytes: int = 0
    restarts: Restarts = Restarts()


class StageBoard:
    """Reports of all stages, as a short stream whose ids are the server's clock. Not durable."""

    def __init__(self, keys: Keys, records: Records) -> None:
        self._key = keys.stages
        self._records = records
        self._last_ms = 0

    async def report(self, reports: Sequence[StageReport]) -> None:
        """Replace this process's reports of these stages.

        Raises:
            BusError: The transport can't be reached, or was closed; nothing was written.
        """
        body = msgspec.json.encode(list(reports))
        trim = ("MINID", "~", max(0, self._last_ms - _KEPT_S * 1000))
        add = ("XADD", self._key, *trim, "*", JSON, body)
        replies = await self._records.run_all([add, ("EXPIRE", self._key, _KEPT_S)])
        self._last_ms = parse_id(replies[0])[0]

    async def read(self) -> list[StageReport]:
        """Return the last report of every process on each of its stages, sorted by lane, stage and
        age.

        Reports older than `STALE_AFTER_S` and stages that exited cleanly are left out.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """
        now_ms = await self._records.time_ms(self._key)
        oldest = now_ms - int(STALE_AFTER_S * 1000)
        entries = await self._records.run("XRANGE", self._key, max(0, oldest), "+")
        aged: list[tuple[float, StageReport]] = []
        for entry_id, fields in entries:
            age_s = (now_ms - parse_id(entry_id)[0]) / 1000
            try:
                reports = msgspec.json.decode(fields[JSON], type=list[StageReport])
            except (KeyError, ValueError, RecursionError) as error:
                # Written by another version during a rolling upgrade.
                get_logger().debug("bus.undecodable_entry", stream="stages", error=str(error))
                continue
            aged += [(age_s, report) for report in reports]
        return latest(aged)


def latest(reports: Iterable[tuple[float, StageReport]]) -> list[StageReport]:
    """Return the newest report of each process on each stage, without stale ones.

    Args:
        reports: (age in seconds, report), in any order.
    """
    last: dict[tuple[str, str, str, str, int], StageReport] = {}
    for age_s, report in reports:
        key = (report.model, report.lane, report.stage, report.host, report.pid)
        aged = msgspec.structs.replace(report, age_s=max(0.0, age_s))
        if key not in last or aged.age_s <= last[key].age_s:
            last[key] = aged
    current = [
        msgspec.structs.replace(report, process_state=state_of(report.pid, report.process))
        for report in last.values()
        if report.age_s < STALE_AFTER_S and report.state != "gone"
    ]
    return sorted(current, key=lambda report: (report.lane, report.stage, report.age_s))
