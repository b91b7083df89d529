"""The heartbeat of a process: it reports its stages about once a second."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import anyio

from ..bus import Bus
from ..config import Config, NanoInferenceError, cut, roles_here
from ..config.logger import get_logger
from ..stages.actor import Actor
from ..store.board import StageReport, StageState
from ..store.process_state import identity_of
from ..telemetry import Metrics, instruments, names

BEAT_S = 1.0
# Longest wait for the last report of a process that leaves.
_LAST_WORD_S = 1.0


class Heart:
    """Reports all stages of the process to the bus's board, in one write, and to the metrics."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        actors: Mapping[str, Actor],
        metrics: Metrics | None = None,
    ) -> None:
        """`actors`: the current stage objects by role; a restart replaces one."""
        self._config = config
        self._roles = roles_here(config.pipeline)
        self._bus = bus
        self._actors = actors
        self._metrics = metrics or Metrics()
        self._reconnects = 0
        self._host = socket.gethostname()
        self._process = identity_of(os.getpid())
        self._early = anyio.Event()
        # The last incarnation and state of each stage, and their begin.
        self._seen: dict[str, tuple[tuple[str, str], float]] = {}

    def reports(self) -> list[StageReport]:
        """Return the current reports of this process's stages."""
        return [self._report(role) for role in self._roles]

    def beat_soon(self) -> None:
        """Report at once, since a state has changed that others wait for."""
        self._early.set()

    async def beat_forever(self) -> None:
        """Report about once a second; skip reports while the bus is away."""
        log = get_logger()
        while True:
            try:
                await self._bus.store.board.report(self.reports())
                await self._bus.requests.count_queue(self._begun())
                if self._metrics.enabled:
                    await self._measure()
            except NanoInferenceError as error:
                log.debug("heartbeat_not_told", error=error.message)
            with anyio.move_on_after(BEAT_S):
                await self._early.wait()
            self._early = anyio.Event()

    async def _measure(self) -> None:
        reconnects = self._bus.reconnects
        self._metrics.record(instruments.RECONNECTS, reconnects - self._reconnects)
        self._reconnects = reconnects
        for actor in list(self._actors.values()):
            ready = actor.condition()[0] == "ready"
            labels = {names.STAGE: actor.name, **actor.labels}
            self._metrics.record(instruments.STAGE_READY, int(ready), labels)
            if actor.holds_all:
                await actor.measure()

    def _begun(self) -> int | None:
        """Return how many of the lane's requests have begun; None if unknown in this process."""
        numbers = (actor.begun() for actor in self._actors.values() if actor.holds_all)
        return next((begun for begun in numbers if begun is not None), None)

    async def last_word(self) -> None:
        """Report that the stages of this process have left."""
        gone = [self._report(role, ("gone", "")) for role in self._roles]
        try:
            with anyio.move_on_after(_LAST_WORD_S):
                await self._bus.store.board.report(gone)
        except NanoInferenceError as error:
            get_logger().debug("heartbeat_not_told", error=error.message)

    def _report(self, role: str, condition: tuple[StageState, str] | None = None) -> StageReport:
        actor = self._actors.get(role)
        loading: tuple[StageState, str] = ("starting", "it is loading")
        state, reason = condition or (actor.condition() if actor else loading)
        incarnation = actor.incarnation if actor else ""
        load: dict[str, Any] = actor.load() if actor and actor.holds_all else {}
        return StageReport(
            lane=self._config.bus.lane,
            stage=role,
            incarnation=incarnation,
            host=self._host,
            pid=os.getpid(),
            epoch=actor.epoch if actor else 0,
            state=state,
            reason=cut(reason),
            since_s=round(self._in_state_s(role, incarnation, state), 3),
            load=load,
            adapters=actor.adapters() if actor and actor.holds_all else (),
            model=self._config.bus.model,
            process=self._process,
        )

    def _in_state_s(self, role: str, incarnation: str, state: StageState) -> float:
        now = time.monotonic()
        seen = self._seen.get(role)
        if seen is None or seen[0] != (incarnation, state):
            self._seen[role] = seen = ((incarnation, state), now)
        return now - seen[1]
