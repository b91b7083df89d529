"""Stage reports of every process, about once a second, for people and probes.

No stage depends on the board, and it holds nothing of a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from .process_state import ProcessState, state_of

STALE_AFTER_S = 10.0
"""Age at which a silent stage counts as gone: ten missed reports, since a busy machine may miss a
few."""

StageState = Literal["starting", "waiting", "ready", "draining", "gone"]


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter loaded in an executor.

    Attributes:
        id: The name in requests.
        version: Of its weights.
        folder: The source folder; "" if the weights can't be read again.
        rank: The largest rank of its layers.
        num_bytes: Device memory.
    """

    id: str
    version: int
    folder: str = ""
    rank: int = 0
    num_bytes: int = 0


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


class StageBoard(Protocol):
    """Reports of all stages. Not durable."""

    async def report(self, reports: Sequence[StageReport]) -> None:
        """Replace this process's reports of these stages.

        Raises:
            BusError: The transport can't be reached, or was closed; nothing was written.
        """

    async def read(self) -> list[StageReport]:
        """Return the last report of every process on each of its stages, sorted by lane, stage and
        age.

        Reports older than `STALE_AFTER_S` and stages that exited cleanly are left out.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """


class MemoryBoard:
    """`StageBoard` within one process."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, StageReport]] = {}

    async def report(self, reports: Sequence[StageReport]) -> None:
        now = time.monotonic()
        self._reports |= {report.stage: (now, report) for report in reports}

    async def read(self) -> list[StageReport]:
        now = time.monotonic()
        return latest((now - told_at, report) for told_at, report in self._reports.values())


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
