"""One snapshot a second of the pipeline and the gateway, shared by all viewers of the console."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import msgspec

from ...config import NanoInferenceError
from ...pipeline.health import problem_of, roles_of
from ...pipeline.status import PipelineStatus, of_models, of_tenant
from ...store.history import MinuteRecord
from ..caller import Caller, may_use, tenant_seen_by
from ..serving.request_log import RequestLog
from .history import Point, RecordedHistory, point_of

EVERY_S = 1.0
"""Period of snapshots; the lanes report once a second."""

HIDDEN_LOADS = ("settings", "expert_owners")


class Viewer(NamedTuple):
    """A viewer's permissions. Viewers that see the same get the same bytes.

    Attributes:
        tenant: The only tenant whose use it sees; None for all.
        models: The models that it sees; None for all.
    """

    tenant: str | None
    models: tuple[str, ...] | None


def viewer_of(caller: Caller) -> Viewer:
    """Return what a caller may see, as `LoggedRequest.seen_by` has it."""
    return Viewer(tenant_seen_by(caller), caller.models)


class Snapshot(NamedTuple):
    """The state at one moment.

    Attributes:
        at_ms: Wall clock.
        status: Status of the pipeline; None if the bus can't be reached.
        problem: The reason for no status.
    """

    at_ms: int
    status: PipelineStatus | None
    problem: str


class Feed:
    """Reads the state once a second for all viewers, and for the history that `keep` fills.

    Each viewer waits for the next snapshot and takes the newest: one that is slow skips some, and
    none has a queue that grows.

    Attributes:
        history: The points of the charts.
        reads: Number of reads so far.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[PipelineStatus]],
        log: RequestLog,
        gateway: Callable[[], dict[str, int]],
        record: MinuteRecord,
        every_s: float = EVERY_S,
    ) -> None:
        """
        Args:
            read: Reads the status from the board.
            log: The last requests of this gateway.
            gateway: Returns numbers of this gateway.
            record: The minutes of the charts.
            every_s: Period of snapshots.
        """
        self._read, self._log, self._gateway = read, log, gateway
        self._every_s = every_s
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: Snapshot | None = None
        self._changed = anyio.Event()
        self._closed = False
        self.history = RecordedHistory(record)
        self._encoded: dict[Viewer, bytes] = {}
        self.reads = 0

    async def snapshots(self, viewer: Viewer) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield the name and the JSON of events."""
        with self._watching():
            seen: Snapshot | None = None
            while not self._closed:
                if self._latest is seen or self._latest is None:
                    await self._changed.wait()
                    continue
                seen = self._latest
                yield "snapshot", self._encode(seen, viewer)

    async def keep(self) -> None:
        """Read until cancelled, so that charts begin before a viewer comes."""
        with self._watching():
            await anyio.sleep_forever()

    def points(self, viewer: Viewer) -> dict[str, list[Point]]:
        """Return the history; empty for a viewer of some models, since its totals are of all."""
        if viewer.models is not None:
            return {"seconds": [], "minutes": []}
        return {"seconds": list(self.history.seconds), "minutes": self.history.minutes}

    def close(self) -> None:
        """End all viewers' streams: the gateway stops."""
        self._closed = True
        self._changed.set()

    @contextmanager
    def _watching(self) -> Any:
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="console")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = self._latest = None

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            status, problem = None, ""
            self.reads += 1
            try:
                status = await self._read()
            except NanoInferenceError as error:
                problem = error.message
            self._latest = Snapshot(int(time.time() * 1000), status, problem)
            self._encoded.clear()
            changed, self._changed = self._changed, anyio.Event()
            changed.set()
            await self.history.keep(point_of(self._latest.at_ms, status))
            await asyncio.sleep(max(0.1, self._every_s - (time.monotonic() - started)))

    def _encode(self, snapshot: Snapshot, viewer: Viewer) -> bytes:
        found = self._encoded.get(viewer)
        if found is None:
            found = self._encoded[viewer] = msgspec.json.encode(self._shown(snapshot, viewer))
        return found

    def _shown(self, snapshot: Snapshot, viewer: Viewer) -> dict[str, Any]:
        status = snapshot.status
        caller = Caller(models=viewer.models)
        if status is not None and status.models and viewer.models is not None:
            status = of_models(status, [each for each in status.models if may_use(caller, each)])
        if status is not None:
            status = of_tenant(status, viewer.tenant)
        tenants = [each for each in self._log.tenants() if viewer.tenant in (None, each.tenant)]
        return {
            "at_ms": snapshot.at_ms,
            "problem": snapshot.problem,
            "gateway": self._gateway() | {"requests": self._log.changes},
            "tenants": sorted(tenants, key=lambda each: -each.tokens)[:32],
            "status": None if status is None else _status(status),
        }


def _status(status: PipelineStatus) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(status)
    for lane, shown in zip(status.lanes, found["lanes"], strict=True):
        shown["ready"] = lane.ready
        shown["roles"] = {str(replica): role for replica, role in roles_of(lane).items()}
        for role, report in lane.stages.items():
            stage = shown["stages"][role]
            stage["problem"] = problem_of(report, lane.epoch)
            stage["load"] = {
                name: each for name, each in report.load.items() if name not in HIDDEN_LOADS
            }
    return found
