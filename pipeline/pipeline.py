"""The pipeline of one process: its bus, its stages, supervision, heartbeat, drain and stop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from msgspec.structs import replace

from ..bus import Bus, open_bus
from ..bus.control import Drain
from ..bus.links import CONTROL
from ..bus.public import Output
from ..config import STAGES, Config, ConfigError, NanoInferenceError, cut, roles_here, split_role
from ..config.errors import leaves_of
from ..config.forks import check_not_forked
from ..config.logger import get_logger
from ..stages.actor import Actor, StageContext
from ..stages.read_ahead import read_ahead
from ..store.board import Restarts, StageReport, StageState
from ..store.process_state import ProcessUse, identity_of
from ..telemetry import Metrics, Tracing, instruments, names, setup_metrics, setup_tracing
from .client import BusClient
from .scoring import Request, Submitter
from .supervisor import actor_class, supervise

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
        restarts: Restarts = Restarts(),  # noqa: B008  (it is frozen)
    ) -> None:
        """Args: the current stage objects by role, of which a restart replaces one; and restarts
        of this process."""
        self._config = config
        self._roles = roles_here(config.pipeline)
        self._bus = bus
        self._actors = actors
        self._metrics = metrics or Metrics()
        self._reconnects = 0
        self._host = socket.gethostname()
        self._process = identity_of(os.getpid())
        self._use = ProcessUse()
        self._early = anyio.Event()
        # The last incarnation and state of each stage, and their begin.
        self._seen: dict[str, tuple[tuple[str, str], float]] = {}
        self._restarts = dict.fromkeys(self._roles, restarts)

    def restarted(self, role: str, cause: str) -> None:
        """Count a restart of a stage within this process."""
        self._restarts[role] = self._restarts[role].after(cause)

    def reports(self) -> list[StageReport]:
        """Return the current reports of this process's stages."""
        cpu, memory = self._use.read()
        reports = [self._report(role) for role in self._roles]
        return [replace(report, cpu=cpu, memory_bytes=memory) for report in reports]

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
                log.debug("heartbeat_not_told", error=str(error))
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
            restarts = self._restarts[actor.role].count
            self._metrics.record(instruments.STAGE_RESTARTS, restarts, labels)
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
            get_logger().debug("heartbeat_not_told", error=str(error))

    def _report(self, role: str, condition: tuple[StageState, str] | None = None) -> StageReport:
        actor = self._actors.get(role)
        loading: tuple[StageState, str] = ("starting", "it is loading")
        state, reason = condition or (actor.condition() if actor else loading)
        incarnation = actor.incarnation if actor else ""
        load: dict[str, Any] = {}
        if actor and actor.holds_all:
            load = actor.load() | actor.traffic()
        elif actor and (share := actor.loaded_share()) is not None:
            load = {"loaded": round(share, 3)}
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
            restarts=self._restarts[role],
        )

    def _in_state_s(self, role: str, incarnation: str, state: StageState) -> float:
        now = time.monotonic()
        seen = self._seen.get(role)
        if seen is None or seen[0] != (incarnation, state):
            self._seen[role] = seen = ((incarnation, state), now)
        return now - seen[1]


# Time beyond the drain limit for the last errors to be written.
_GRACE_S = 5.0


class Pipeline(Submitter):
    """Runs this process's stages while the context is open.

    ```python
    async with Pipeline(Config()) as pipeline:
        async for output in pipeline.submit({"prompt": "98 + 25 ="}):
            print(output)
    ```

    With all five stages here, entering waits until they are ready, by default. Leaving stops them
    at once; call `drain` before to let requests in flight finish. When a stage has used up its
    restarts, pending outputs raise ChannelClosed, and the context raises StageFailed.

    Attributes:
        client: The client on this pipeline's own bus.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        tracing: Tracing | None = None,
        wait_for_bus: bool = False,
        wait_until_ready: bool = True,
        with_metrics: bool = False,
        standby: bool = False,
        restarts: Restarts = Restarts(),  # noqa: B008  (it is frozen)
    ) -> None:
        """A pipeline that begins when it is entered.

        Args:
            config: The settings.
            tracing: Makes its spans; None: as in the settings.
            wait_for_bus: Start before the bus can be reached.
            wait_until_ready: With all five stages here, enter when all are ready. Requests that are
                submitted earlier wait.
            with_metrics: Record metrics without `telemetry.metrics_port`, too, for a gateway on
                this pipeline's client.
            standby: Load all that the stages need, and take part only after `take_over`.
            restarts: Restarts of this process.
        """
        self.config = config or Config()
        self._wait_for_bus = wait_for_bus
        self._wait_until_ready = wait_until_ready
        self._with_metrics = with_metrics
        self._restarts = restarts
        self._called = asyncio.Event()
        if not standby:
            self._called.set()
        self.bus: Bus
        self.metrics: Metrics
        self.client: BusClient
        self._given_tracing = tracing
        self._roles = roles_here(self.config.pipeline)
        self._actors: dict[str, Actor] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._drained = asyncio.Event()
        self._stages_task: asyncio.Task[None]
        self._heart: Heart
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        task: asyncio.Task[None] | None = getattr(self, "_stages_task", None)
        state = "not entered" if task is None else "left" if task.done() else "entered"
        if self._failure is not None:
            state = f"failed: {self._failure}"
        return f"Pipeline({self.config!r}, {state})"

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Pipeline:
        """Start the stages.

        Raises:
            BusError: The bus can't be reached.
            ConfigError: The port for the metrics is taken.
            ModelError: The model can't be loaded; or this is a fork of a process with an engine.
        """
        if "executor" in self.config.pipeline.stages:
            check_not_forked()
        stages, replicas = self.config.pipeline.stages, self.config.pipeline.replicas
        self._ready = {role: asyncio.Event() for role in self._roles}
        self.bus = open_bus(self.config.bus, frozenset(self._roles), replicas)
        instance = f"{socket.gethostname()}-{os.getpid()}"
        model = self.config.bus.model  # of several models
        labels = {names.REQUEST_MODEL: model} if model else {}
        try:
            if not self._wait_for_bus:
                await self.bus.ping()
            # The port of a standby is that of the process which it replaces.
            listens = self._called.is_set()
            metrics = setup_metrics(
                self.config.telemetry,
                instance,
                self._with_metrics,
                listens=listens,
                model=self.config.engine.model_name,
            )
            self.metrics = metrics.labelled(labels)
        except BaseException:
            await self.bus.aclose()
            raise
        self.tracing = self._given_tracing or setup_tracing(
            self.config.telemetry, instance, labels=labels
        )
        self.client = BusClient(self.bus, self.tracing, self.metrics)
        self._heart = Heart(self.config, self.bus, self._actors, self.metrics, self._restarts)
        # A task of its own holds the stages' task group, so that one task may enter the context
        # and another leave it, as test fixtures and servers' hooks do.
        self._stages_task = asyncio.create_task(self._run_stages(), name="stages")
        if self._wait_until_ready and set(stages) == set(STAGES):
            try:
                await self.ready()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            if self._failure is None and not self._stages_task.done():
                await self._leave()
                self._stages_task.cancel()
            await asyncio.gather(self._stages_task, return_exceptions=True)
            if self._failure is None and self._called.is_set():
                await self._heart.last_word()
            await self.bus.aclose()
            await anyio.to_thread.run_sync(self.metrics.shutdown, limiter=anyio.CapacityLimiter(1))
            if self._given_tracing is None:
                await anyio.to_thread.run_sync(
                    self.tracing.shutdown, limiter=anyio.CapacityLimiter(1)
                )
        if self._failure is not None:
            # An error of the body is a consequence of this one.
            raise self._failure from None

    async def failed(self) -> None:
        """Wait until the pipeline has failed, and raise its error.

        Raises:
            StageFailed, ModelError, ConfigError: See `supervise`.
        """
        await asyncio.shield(self._stages_task)

    def take_over(self) -> None:
        """Let the stages of a standby take part, since the process that it replaces has ended."""
        try:
            self.metrics.listen(self.config.telemetry)
        except ConfigError as error:
            get_logger().error("no_metrics", reason=str(error))
        self._called.set()

    async def ready(self) -> None:
        """Wait until this process's stages take part; with admission here, until all do.

        Raises:
            StageFailed, ModelError, ConfigError: The pipeline has failed.
        """
        for event in self._ready.values():
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([waiting, self._stages_task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._stages_task.done():
                await self._stages_task

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Admit no more requests and wait for those in flight.

        Args:
            timeout_s: Unfinished requests end with an error then; None for the configured limit.

        Returns:
            Whether every request got its terminal message; true without admission in this process.
        """
        if "admission" not in self.config.pipeline.stages:
            return True
        limit = self.config.pipeline.drain_timeout_s if timeout_s is None else timeout_s
        sender = self.bus.sender(CONTROL["admission"], "pipeline")
        await sender.send(Drain(int(limit * 1e9)))
        with anyio.move_on_after(limit + _GRACE_S):
            await self._drained.wait()
        return self._drained.is_set()

    # --- use ----------------------------------------------------------------------------------

    async def publish(self, request: Request | bytes) -> str:
        return await self.client.publish(request)

    def submit(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        return self.client.submit(request)

    def stages(self) -> list[StageReport]:
        """Return the reports of this process's stages; `bus.store.board` has all processes."""
        return self._heart.reports()

    # --- inside -------------------------------------------------------------------------------

    async def _run_stages(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for role in self._roles:
                    group.start_soon(self._supervise, role)
                await self._called.wait()
                group.start_soon(self._heart.beat_forever)
        except BaseExceptionGroup as failures:
            self._failure = _clearest(failures)
            if self._called.is_set():
                await self._heart.last_word()
            # Without stages no output will come: pending reads raise ChannelClosed.
            await self.bus.aclose()
            raise self._failure from None

    async def _supervise(self, role: str) -> None:
        stage, replica = split_role(role)
        context = StageContext(
            self.config,
            self.bus,
            self.tracing,
            on_ready=lambda name: self._takes_part(role),
            on_drained=self._drained.set,
            metrics=self.metrics,
            replica=replica,
            called=self._called.wait,
        )

        if stage == "executor":
            read_ahead(self.config.engine)

        def make() -> Actor:
            self._actors[role] = actor_class(stage)(context)
            return self._actors[role]

        restarted = partial(self._heart.restarted, role)
        await supervise(make, self.config.pipeline, restarted)

    def _takes_part(self, role: str) -> None:
        self._ready[role].set()
        self._heart.beat_soon()

    async def _leave(self) -> None:
        """Notify an admission elsewhere that the state of this process's stages is lost."""
        if "admission" in self.config.pipeline.stages or not self._called.is_set():
            return
        for actor in self._actors.values():
            try:
                with anyio.move_on_after(1.0):
                    await actor.leave("stopped")
            except NanoInferenceError as error:
                get_logger().warning("leave_not_announced", error=str(error))


def _clearest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that explains the failure best; log the others."""
    leaves = leaves_of(group)[::-1]
    ours = [error for error in leaves if isinstance(error, NanoInferenceError)]
    chosen = (ours or leaves)[0]
    for other in leaves:
        if str(other) != str(chosen):
            get_logger().error("stage_failed_too", error=repr(other))
    return chosen
