"""The pipeline of one process: its bus, its stages, their supervision, and the way to stop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from types import TracebackType

import anyio
import anyio.to_thread

from ..bus import Bus, open_bus
from ..bus.control import Drain
from ..bus.links import CONTROL
from ..bus.public import Completion, Output
from ..config import (
    STAGES,
    Config,
    NanoInferenceError,
    roles_here,
    split_role,
)
from ..config.logger import get_logger
from ..stages.actor import Actor, StageContext
from ..store.board import StageReport
from ..telemetry import Metrics, Tracing, names, setup_metrics, setup_tracing
from .client import BusClient
from .completing import Completing, Request
from .heart import Heart
from .supervisor import supervise
from .topology import actor_class

# What is allowed beyond the drain limit for the last errors to be written.
_GRACE_S = 5.0


class Pipeline(Completing):
    """Runs this process's stages while the context is open.

    ```python
    async with Pipeline(Config()) as pipeline:
        async for output in pipeline.submit({"prompt": "98 + 25 ="}):
            print(output)
    ```

    With all five stages here, entering waits until they are ready, unless told not to. Leaving
    stops them at once; call `drain` before to let requests in flight finish. When a stage has used
    up its restarts, whoever waits for an output gets ChannelClosed, and the context raises
    StageFailed.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        tracing: Tracing | None = None,
        wait_for_bus: bool = False,
        wait_until_ready: bool = True,
        with_metrics: bool = False,
    ) -> None:
        """A pipeline that begins when it is entered.

        Args:
            config: The settings.
            tracing: Makes its spans; None for what the settings say.
            wait_for_bus: Start although the bus can't be reached, and work once it can.
            wait_until_ready: Enter only when all five stages are ready, where all are here. What
                is submitted before that waits.
            with_metrics: Record metrics without `telemetry.metrics_port` too, for a gateway on this
                pipeline's client, which shows them.
        """
        self.config = config or Config()
        self._wait_for_bus = wait_for_bus
        self._wait_until_ready = wait_until_ready
        self._with_metrics = with_metrics
        self.bus: Bus
        self.metrics: Metrics
        self._client: BusClient
        self._given_tracing = tracing
        self._roles = roles_here(self.config.pipeline)
        self._actors: dict[str, Actor] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._drained = asyncio.Event()
        self._house: asyncio.Task[None]
        self._heart: Heart
        self._failure: BaseException | None = None

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Pipeline:
        """Starts the stages.

        Raises:
            BusError: The bus can't be reached.
            ConfigError: The port for the metrics is taken.
            ModelError: The model can't be loaded.
        """
        stages, replicas = self.config.pipeline.stages, self.config.pipeline.replicas
        self._ready = {role: asyncio.Event() for role in self._roles}
        self.bus = open_bus(self.config.bus, frozenset(self._roles), replicas)
        instance = f"{socket.gethostname()}-{os.getpid()}"
        # Of several models: where there is one, nobody has to tell it from others.
        model = self.config.bus.model
        labels = {names.REQUEST_MODEL: model} if model else {}
        try:
            if not self._wait_for_bus:
                await self.bus.ping()
            metrics = setup_metrics(
                self.config.telemetry, instance, without_port=self._with_metrics
            )
            self.metrics = metrics.labelled(labels)
        except BaseException:
            await self.bus.aclose()
            raise
        self.tracing = self._given_tracing or setup_tracing(
            self.config.telemetry, instance, labels=labels
        )
        self._client = BusClient(self.bus, self.tracing, self.metrics)
        self._heart = Heart(self.config, self.bus, self._actors, self.metrics)
        # A task of its own holds the stages' task group, so that the context may be left from
        # another task than it was entered from, as test fixtures and servers' hooks do.
        self._house = asyncio.create_task(self._run_stages(), name="stages")
        if self._wait_until_ready and set(stages) == set(STAGES):
            try:
                await self.ready()
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            if self._failure is None and not self._house.done():
                await self._leave()
                self._house.cancel()
            await asyncio.gather(self._house, return_exceptions=True)
            if self._failure is None:
                await self._heart.last_word()
            await self.bus.aclose()
            await anyio.to_thread.run_sync(self.metrics.shutdown)
            if self._given_tracing is None:
                await anyio.to_thread.run_sync(self.tracing.shutdown)
        if self._failure is not None:
            # What the body raised, if anything, came from this.
            raise self._failure from None

    async def failed(self) -> None:
        """Waits until the pipeline has failed, and raises what it failed with.

        Raises:
            StageFailed, ModelError, ConfigError: See `supervise`.
        """
        await asyncio.shield(self._house)

    async def ready(self) -> None:
        """Waits until this process's stages take part; with admission here, until all do.

        Raises:
            StageFailed, ModelError, ConfigError: The pipeline has failed.
        """
        for event in self._ready.values():
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([waiting, self._house], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._house.done():
                await self._house

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Lets nothing more in and waits for the requests in flight.

        Args:
            timeout_s: What is not done by then ends with an error; the configured limit when None.

        Returns:
            Whether every request got its terminal message. A process without admission has
            nothing to drain.
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

    def submit(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        """As BusClient.submit."""
        return self._client.submit(request)

    async def complete(self, request: Request | bytes) -> Completion:
        """As BusClient.complete."""
        return await self._client.complete(request)

    def stages(self) -> list[StageReport]:
        """How the stages of this process are now; `bus.store.board` has those of all processes."""
        return self._heart.reports()

    @property
    def client(self) -> BusClient:
        """The client on this pipeline's own bus."""
        return self._client

    # --- inside -------------------------------------------------------------------------------

    async def _run_stages(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for role in self._roles:
                    group.start_soon(self._supervise, role)
                group.start_soon(self._heart.beat_forever)
        except BaseExceptionGroup as failures:
            self._failure = _clearest(failures)
            await self._heart.last_word()
            # Without stages no output will ever come; nobody shall wait for one.
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
        )

        def make() -> Actor:
            self._actors[role] = actor_class(stage)(context)
            return self._actors[role]

        await supervise(make, self.config.pipeline)

    def _takes_part(self, role: str) -> None:
        self._ready[role].set()
        self._heart.beat_soon()

    async def _leave(self) -> None:
        """Tells an admission elsewhere that what this process's stages hold is lost."""
        if "admission" in self.config.pipeline.stages:
            return
        for actor in self._actors.values():
            try:
                with anyio.move_on_after(1.0):
                    await actor.leave("stopped")
            except NanoInferenceError as error:
                get_logger().warning("leave_not_announced", error=error.message)


def _clearest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says what happened, out of those that the tasks raised."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    ours = [error for error in leaves if isinstance(error, NanoInferenceError)]
    chosen = (ours or leaves)[0]
    for other in leaves:
        if str(other) != str(chosen):
            get_logger().error("stage_failed_too", error=repr(other))
    return chosen
