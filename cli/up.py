"""`nano-inference up`: every stage as a process of its own, over Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import typer
from rich.console import Console
from rich.text import Text

from ..bus import open_bus
from ..bus.control import StageStopped
from ..bus.links import CONTROL
from ..config import (
    DEFAULT_URL,
    REPLICATED,
    BusError,
    Config,
    NanoInferenceError,
    all_roles,
    as_environment,
    load_config,
    redact,
    split_role,
)
from ..config.temporary import sweep
from ..gateway.gateway import place_of
from ..pipeline.supervisor import RestartBudget, StageFailed
from .child_output import Line, Lines
from .children import Child, ForkServer, ForkServerLost, python, spawn
from .embedded import embedded_server
from .gateway import GatewayPort, GrpcPort, Insecure
from .options import ENGINE_OPTIONS, Options, takes_options
from .process import DRAIN
from .waterfall import STAGE_STYLES

_GATEWAY = "gateway"

_STYLES = {**STAGE_STYLES, _GATEWAY: "white"}
# What a child exits with when trying again would not help; see app.py.
_CAN_NOT_START = 2
# What it exits with when somebody told it to leave, by SIGTERM: before it could answer the signal,
# or in good order.
_LEFT = (-signal.SIGTERM, 0)
# For telling admission that a process has ended.
_TELL_S = 1.0
# From SIGTERM to SIGKILL, for children that have nothing to drain.
_STOP_S = 10.0


@takes_options("reference", *ENGINE_OPTIONS)
def up(
    options: Options,
    port: Annotated[
        int, typer.Option(help="Port of the embedded server, when no --bus is given.")
    ] = urlsplit(DEFAULT_URL).port or 0,
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
    if config.gateway.listens:
        place_of(config)  # before anything is started
    sweep()
    with contextlib.ExitStack() as stack:
        if config.bus.url == "memory":
            url = stack.enter_context(embedded_server(port))
            config = load_config(options.config_file, overrides=overrides | {"bus.url": url})
        file = options.config_file
        arguments = [] if file is None else ["--config", str(file)]
        environment = _child_environment(config, overrides)
        anyio.run(_reach, config)  # so that one process complains, and not five
        anyio.run(_House(config, arguments, environment).run)


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
        self._arguments = ("--with-parent", *arguments)
        self._environment = environment
        self._roles = all_roles(config.pipeline.replicas)
        if config.gateway.listens:
            self._roles = (*self._roles, _GATEWAY)
        self._children: dict[str, Child] = {}
        self._forks = self._fork_servers()
        # Replicas of which a stage has used up its restarts.
        self._given_up: set[int] = set()
        self._stopping = False
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    async def run(self) -> None:
        """Runs until a signal comes.

        Raises:
            StageFailed: A child has used up its restarts, and no replica can do without it.
            NanoInferenceError: A child can't start; it has said why.
        """
        number = {5: "five", 6: "six", 7: "seven"}.get(len(self._roles), str(len(self._roles)))
        self._say(f"starting {number} processes over {redact(self._config.bus.url)}")
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                async with anyio.create_task_group() as group:
                    for role in self._roles:
                        group.start_soon(self._keep_running, role)
                    await anext(signals)
                    self._say("stopping: requests in flight may finish; a second Ctrl-C kills")
                    group.start_soon(self._kill_on_second, signals)
                    await self._stop_all()
                    group.cancel_scope.cancel()
            except* NanoInferenceError as failures:
                raise failures.exceptions[0] from None
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop_all()
                self.close()

    def close(self) -> None:
        """Ends what processes are forked from; they go on."""
        for server in self._forks.values():
            server.close()

    async def _keep_running(self, role: str) -> None:
        budget = RestartBudget(role, self._config.pipeline)
        while not self._stopping:
            status = await self._run_once(role)
            if self._stopping:
                return
            if status in _LEFT:
                self._say(f"{role} was told to leave; starting its successor")
                continue
            if status == _CAN_NOT_START:
                raise NanoInferenceError(f"the {role} stage can't start; it says why above")
            try:
                wait_s = budget.failed(time.monotonic())
            except StageFailed as error:
                self._give_up(role, error)
                await self._tell_of_end(role)
                return
            self._say(f"{role} ended with status {status}; starting it again in {wait_s:g} s")
            await self._tell_of_end(role)
            await anyio.sleep(wait_s)

    def _give_up(self, role: str, error: StageFailed) -> None:
        """Goes on without a replica, as long as there are others. Raises the error if not."""
        stage, replica = split_role(role)
        self._given_up.add(replica)
        if stage not in REPLICATED or len(self._given_up) == self._config.pipeline.replicas:
            raise error
        self._say(f"{error.message}; the other replicas go on without it")

    async def _tell_of_end(self, role: str) -> None:
        """Tells admission what a process that was killed could not: others take over its work."""
        if self._config.pipeline.replicas == 1 or role == _GATEWAY:
            return  # nobody could; and its successor says that it has come
        bus = open_bus(self._config.bus)
        try:
            with anyio.move_on_after(_TELL_S):
                sender = bus.sender(CONTROL["admission"], "up")
                await sender.send(StageStopped(role, "", "its process ended"))
                await sender.flush()
        except BusError as error:
            self._say(f"admission could not be told: {error.message}")
        finally:
            with anyio.move_on_after(_TELL_S):
                await bus.aclose()

    async def _run_once(self, role: str) -> int:
        child = self._children[role] = await self._start(role)
        lines = Lines()
        async with contextlib.aclosing(child.output()) as output:
            async for chunk in output:
                for line in lines.feed(chunk):
                    self._print(role, line)
                    await anyio.lowlevel.checkpoint()  # a flood of one leaves others their turn
        for line in lines.end():
            self._print(role, line)
        return await child.wait()

    def _fork_servers(self) -> dict[str, ForkServer]:
        """By stage, and "gateway"; the executor has one for itself, since only it has torch."""
        if self._config.pipeline.start_method == "spawn" or sys.platform != "linux":
            return {}
        stages = dict.fromkeys(split_role(role)[0] for role in self._roles)
        alone = ForkServer(("executor",), self._environment)
        others = [stage for stage in stages if stage != "executor"]
        together = ForkServer(others, self._environment)
        return {stage: alone if stage == "executor" else together for stage in stages}

    async def _start(self, role: str) -> Child:
        if server := self._forks.get(split_role(role)[0]):
            try:
                return await server.start(self._command(role))
            except ForkServerLost as error:
                self._say(f"{role} can't be forked ({error}); starting it as a program of its own")
        return await spawn([*python(), "nano_inference", *self._command(role)], self._environment)

    def _command(self, role: str) -> list[str]:
        """The arguments of `nano-inference`."""
        if role == _GATEWAY:
            command = ["gateway", *self._arguments]
        else:
            stage, replica = split_role(role)
            command = ["run", *self._arguments, "--stages", stage]
            if stage in REPLICATED:
                command += ["--set", f"pipeline.replica={replica}"]
        if port := self._config.telemetry.metrics_port:
            # Metrics of each process on a port of its own.
            number = port + self._roles.index(role)
            command += ["--set", f"telemetry.metrics_port={number}"]
        return command

    async def _stop_all(self) -> None:
        """The gateway first, which lets its calls end, then admission, while the others work."""
        self._stopping = True
        limit_s = self._config.pipeline.drain_timeout_s + _STOP_S
        await self._stop(_GATEWAY, limit_s)
        await self._stop("admission", limit_s, drain=True)
        async with anyio.create_task_group() as group:
            for role in self._roles[1:]:
                group.start_soon(self._stop, role, _STOP_S)

    async def _stop(self, role: str, limit_s: float, *, drain: bool = False) -> None:
        child = self._children.get(role)
        if child is None or child.returncode is not None:
            return
        if drain:
            await child.tell(DRAIN)
        else:
            child.send_signal(signal.SIGTERM)
        with anyio.move_on_after(limit_s):
            await child.wait()
            return
        self._say(f"{role} does not stop; killing it")
        child.send_signal(signal.SIGKILL)
        await child.wait()

    async def _kill_on_second(self, signals: AsyncIterator[signal.Signals]) -> None:
        await anext(signals)
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    def _say(self, text: str) -> None:
        self._write(Text("up         ", style="bold") + Text(text))

    def _print(self, role: str, line: Line) -> None:
        self._write(Text(f"{role:<10} ", style=_STYLES[split_role(role)[0]]) + Text(str(line)))

    def _write(self, text: Text) -> None:
        # On a disk that is full, say; the pipeline is worth more than a line.
        with contextlib.suppress(OSError):
            self._console.print(text)
