"""`up` with several models: the processes of each, and in this one what moves and manages them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
import msgspec
import yaml

from ..bus import open_bus
from ..config import Config, ConfigError, ModelConfig, NanoInferenceError, all_roles, redact
from ..pipeline.model_manager import ModelManager
from ..pipeline.router import Router
from ..telemetry import setup_logging, setup_metrics
from .forks import Forks
from .processes import GATEWAY, STOPPING, Identity, Printer, Processes, kill_on_second

_LAST_PORT = 65_535


class MetricsPorts:
    """A port for the metrics of each process: that of the settings for this one, the next for the
    gateway, and behind these a few for each model, which keeps them when it is loaded again."""

    def __init__(self, first: int) -> None:
        """`first`: 0 for no metrics."""
        self._first = first
        self._next = first + 2
        self._of: dict[str, tuple[int, ...]] = {}

    @property
    def gateway(self) -> tuple[int, ...]:
        """That of the gateway."""
        return (self._first + 1,) if self._first else ()

    def of(self, model: str, number: int) -> tuple[int, ...]:
        """Those of a model's processes, of which there are so many.

        Raises:
            ConfigError: There are no more.
        """
        if not self._first:
            return ()
        if len(self._of.get(model, ())) < number:
            ports = tuple(range(self._next, self._next + number))
            if ports[-1] > _LAST_PORT:
                raise ConfigError(
                    f"telemetry.metrics_port {self._first} leaves no ports for all processes; "
                    "take a smaller one"
                )
            self._of[model] = ports
            self._next += number
        return self._of[model][:number]


class SeveralModels:
    """Several models: this process moves requests and manages, all else is done by others."""

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Args: the settings, and what makes a child read the same (None: this process's own).

        Raises:
            ConfigError: What is set for one of the models can't be.
        """
        for model in config.models:
            config.of_model(model)
        self._config = config
        self._arguments = tuple(arguments)
        self._ports = MetricsPorts(config.telemetry.metrics_port)
        self._printer = Printer([model.id for model in config.models])
        roles = all_roles(1)
        if config.gateway.listens:
            roles = (*roles, GATEWAY)
        method = config.pipeline.start_method
        self._forks = Forks(roles, method, environment, self._printer.say)
        self._running: list[Processes] = []

    async def run(self) -> None:
        """Runs until a signal comes.

        Raises:
            StageFailed: The gateway has used up its restarts.
            NanoInferenceError: It can't start, and has said why.
        """
        config = self._config
        setup_logging(config.telemetry)
        bus = open_bus(config.bus)
        metrics = setup_metrics(config.telemetry, f"models-{os.getpid()}")
        manager = ModelManager(config, bus, self._processes_of, metrics)
        router = Router(bus, metrics)
        names = ", ".join(model.id for model in config.models)
        self._printer.say(f"serving {names} over {redact(config.bus.url)}")
        gateway = self._gateway()
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(manager.run_forever)
                    group.start_soon(_route, manager, router)
                    group.start_soon(gateway.run)
                    await anext(signals)
                    self._printer.say(STOPPING)
                    group.start_soon(kill_on_second, signals, self._kill)
                    await self._stop(gateway, manager)
                    group.cancel_scope.cancel()
            except* NanoInferenceError as failures:
                raise failures.exceptions[0] from None
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(gateway, manager)
                    await bus.aclose()
                    await anyio.to_thread.run_sync(metrics.shutdown)
                self._forks.close()

    def _gateway(self) -> Processes:
        """The gateway's process, where one is wanted."""
        identity = Identity(self._config, self._arguments, self._ports.gateway)
        roles = (GATEWAY,) if self._config.gateway.listens else ()
        gateway = Processes(identity, roles, self._forks, self._printer)
        self._running.append(gateway)
        return gateway

    def _processes_of(self, model: ModelConfig, config: Config) -> Processes:
        roles = all_roles(config.pipeline.replicas)
        own = tuple(
            part
            for name, value in model.overrides.items()
            for part in ("--set", f"{name}={_written(value)}")
        )
        ports = self._ports.of(model.id, len(roles))
        identity = Identity(config, (*self._arguments, *own), ports)
        processes = Processes(identity, roles, self._forks, self._printer)
        # Those of former loads have ended.
        self._running = [each for each in self._running if each.pids or GATEWAY in each.roles]
        self._running.append(processes)
        return processes

    async def _stop(self, gateway: Processes, manager: ModelManager) -> None:
        """The gateway first, which lets its calls end, then the models, side by side."""
        await gateway.stop()
        await manager.stop()

    def _kill(self) -> None:
        for processes in self._running:
            processes.kill()


async def _route(manager: ModelManager, router: Router) -> None:
    """Moves requests once it is written down which models there are: those that have waited for the
    deployment would be refused before."""
    await manager.begun()
    await router.run_forever()


def _written(value: object) -> str:
    """A value as `--set` reads it."""
    text: str = yaml.safe_dump(
        msgspec.to_builtins(value), default_flow_style=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")
