"""`nano-inference up`: every stage as a process of its own, over Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import typer

from ..bus import open_bus
from ..config import (
    DEFAULT_URL,
    Config,
    NanoInferenceError,
    all_roles,
    as_environment,
    load_config,
    redact,
)
from ..config.temporary import sweep
from ..gateway.gateway import check_ports
from .embedded import embedded_server
from .forks import Forks
from .gateway import MOST_PORT, GatewayPort, GrpcPort, Insecure
from .model_paths import check_model_files
from .options import ENGINE_OPTIONS, Options, takes_options
from .processes import GATEWAY, STOPPING, Identity, Printer, Processes, kill_on_second

SERVER_PORT = urlsplit(DEFAULT_URL).port or 0
"""Of the embedded server, unless it is said."""

ServerPort = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=1,
        max=MOST_PORT,
        help="Port of the embedded server, when no --bus is given.",
    ),
]


@takes_options("reference", *ENGINE_OPTIONS)
def up(
    options: Options,
    port: ServerPort = SERVER_PORT,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pairs of batching and executor; 1 by default.", show_default=False
        ),
    ] = None,
    gateway: GatewayPort = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
) -> None:
    """Run each stage as a process of its own, over Redis.

    Without --bus an embedded Valkey server is started on 127.0.0.1 and stopped at the end:

        nano-inference up

        nano-inference submit "98 + 25 ="        (in another terminal)

    With `models` in the settings it serves several models, each with processes of its own, which
    are loaded and unloaded while the others serve.

    With --replicas 2 there are two executors, each with its batching stage, behind one queue:

        nano-inference up --replicas 2

    A process that dies is started again, within a budget. One that you end with SIGTERM is
    replaced at once, and its requests go on. Ctrl-C or SIGTERM to this process lets requests in
    flight finish, within `pipeline.drain_timeout_s`, and stops all.
    """
    if replicas is not None:
        options = options.adding(f"pipeline.replicas={replicas}")
    if gateway is not None:
        options = options.adding(f"gateway.port={gateway}")
    if grpc_port is not None:
        options = options.adding(f"gateway.grpc_port={grpc_port}")
    if insecure:
        options = options.adding("gateway.insecure=true")
    config, overrides = options.config(), options.overrides()
    check_model_files(config, options.model)
    if config.gateway.listens:
        check_ports(config, "--gateway", "--grpc-port")
    sweep()
    with contextlib.ExitStack() as stack:
        if config.bus.url == "memory":
            url = stack.enter_context(embedded_server(port))
            config = load_config(options.config_file, overrides=overrides | {"bus.url": url})
        file = options.config_file
        arguments = [] if file is None else ["--config", str(file)]
        environment = _child_environment(config, overrides)
        anyio.run(_reach, config)  # so that one process complains, and not five
        anyio.run(_run, config, arguments, environment)


async def _run(config: Config, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    if config.models:
        # Who has a single one does not wait for these imports.
        from .several_models import SeveralModels

        await SeveralModels(config, arguments, environment).run()
    else:
        await _House(config, arguments, environment).run()


async def _reach(config: Config) -> None:
    bus = open_bus(config.bus)
    try:
        await bus.ping()
    finally:
        await bus.aclose()


def _child_environment(config: Config, overrides: Mapping[str, Any]) -> dict[str, str]:
    """What makes a child read the same settings: command lines are for every user to read, and a
    setting may be a password."""
    settings = {**overrides, "bus.url": config.bus.url}
    if config.telemetry.log_format == "auto" and sys.stderr.isatty():
        settings["telemetry.log_format"] = "text"
    environment = as_environment(settings, os.environ)
    if path := environment.get("PYTHONPATH"):
        # An empty part is the working folder too; few who have one mean that.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path.split(os.pathsep)))
    return environment


class _House:
    """The processes: five, two for each further replica, and the gateway's where one is wanted."""

    def __init__(
        self,
        config: Config,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Args: the settings, and what makes a child read the same (None: this process's own)."""
        self._config = config
        roles = all_roles(config.pipeline.replicas)
        if config.gateway.listens:
            roles = (*roles, GATEWAY)
        # Metrics of each process on a port of its own.
        first = config.telemetry.metrics_port
        ports = tuple(range(first, first + len(roles))) if first else ()
        self._printer = Printer()
        self._forks = Forks(roles, config.pipeline.start_method, environment, self._printer.say)
        identity = Identity(config, tuple(arguments), ports)
        self._processes = Processes(identity, roles, self._forks, self._printer)

    async def run(self) -> None:
        """Runs until a signal comes.

        Raises:
            StageFailed: A child has used up its restarts, and no replica can do without it.
            NanoInferenceError: A child can't start; it has said why.
        """
        roles = self._processes.roles
        number = {5: "five", 6: "six", 7: "seven"}.get(len(roles), str(len(roles)))
        url = redact(self._config.bus.url)
        self._printer.say(f"starting {number} processes over {url}")
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._processes.run)
                    await anext(signals)
                    self._printer.say(STOPPING)
                    group.start_soon(kill_on_second, signals, self._processes.kill)
                    await self._processes.stop(drain=True)
                    group.cancel_scope.cancel()
            except* NanoInferenceError as failures:
                raise failures.exceptions[0] from None
            finally:
                with anyio.CancelScope(shield=True):
                    await self._processes.stop(drain=True)
                self._forks.close()
