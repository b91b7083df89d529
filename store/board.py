"""The board on which every process tells, about once a second, how its stages are.

It is for people and for probes: no stage relies on it, and nothing of a request is on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from .process_state import ProcessState, state_of

STALE_AFTER_S = 10.0
"""A stage that has not been heard of for so long is taken for gone. A process reports every
second, so this is ten reports missed: a busy machine may well swallow a few."""

StageState = Literal["starting", "waiting", "ready", "draining", "gone"]


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that an executor has.

    Attributes:
        id: By which requests name it.
        version: Of its weights.
        folder: Where they were read; "" when they can't be had again.
        rank: The largest of its layers.
        num_bytes: That it takes of the device's memory.
    """

    id: str
    version: int
    folder: str = ""
    rank: int = 0
    num_bytes: int = 0


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage of one process is.

    Attributes:
        lane: Of which lane it is a part.
        stage: Its role: "executor", of replica 1 "executor.1".
        incarnation: The stage object; a restart within the process gives a new one.
        host: Where it runs.
        pid: The process.
        epoch: The last epoch that it has heard of.
        state: "starting" until it has loaded; "waiting" until it takes part in an epoch; "ready";
            "draining" when it lets nothing more in; "gone" when it has left, which nobody reads.
        reason: What it waits for; "" when it is ready.
        since_s: How long it has been in this state.
        load: A few numbers that it knows.
        adapters: Admission's: those that requests to its lane can name.
        age_s: How long ago this was told, by the board's own clock.
        model: Whose lane it is, in a deployment of several models.
        process: What `identity_of` its PID is there.
        process_state: How that process is now, if it runs on the reader's machine. The board sets
            it as it is read.
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
    """Where each process reports how its stages are, for people and probes. Not durable."""

    async def report(self, reports: Sequence[StageReport]) -> None:
        """Replaces what this process told before of these stages.

        Raises:
            BusError: The transport can't be reached, or was closed; nothing was told.
        """

    async def read(self) -> list[StageReport]:
        """The last word of every process on each of its stages, by lane, stage and age.

        What is older than `STALE_AFTER_S` or has left in good order is not there.

        Raises:
            BusError: The transport can't be reached, or was closed.
        """


class MemoryBoard:
    """The `StageBoard` within one process."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, StageReport]] = {}

    async def report(self, reports: Sequence[StageReport]) -> None:
        now = time.monotonic()
        self._reports |= {report.stage: (now, report) for report in reports}

    async def read(self) -> list[StageReport]:
        now = time.monotonic()
        return latest((now - told_at, report) for told_at, report in self._reports.values())


def latest(reports: Iterable[tuple[float, StageReport]]) -> list[StageReport]:
    """The newest report of each process on each stage, without those that are out of date.

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
