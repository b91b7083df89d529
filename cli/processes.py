"""Processes that belong together: each is started again when it ends, and all are stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, TextIO, cast

import anyio
import anyio.lowlevel
from rich.console import Console
from rich.text import Text

from ..bus import open_bus
from ..bus.control import StageStopped
from ..bus.links import CONTROL
from ..config import REPLICATED, BusError, Config, NanoInferenceError, split_role
from ..pipeline.supervisor import RestartBudget, StageFailed
from ..telemetry import LogOutput
from .child_output import Line, Lines
from .children import Child
from .forks import Forks
from .process import DRAIN
from .terminal import PROGRAM
from .waterfall import STAGE_STYLES

GATEWAY = "gateway"
"""The role of the process that is no stage."""

STOPPING = "stopping: requests in flight may finish; a second Ctrl-C kills"

STOP_S = 10.0
"""From SIGTERM to SIGKILL, for children that have nothing to drain."""

_STYLES = {**STAGE_STYLES, GATEWAY: "white"}
# What a child exits with when trying again would not help; see app.py.
_CAN_NOT_START = 2
# What it exits with when somebody told it to leave, by SIGTERM: before it could answer the signal,
# or in good order.
_LEFT = (-signal.SIGTERM, 0)
# For telling admission that a process has ended.
_TELL_S = 1.0
# Of a sentence with which a command ends; see `terminal.complain`.
_COMPLAINT = f"{PROGRAM}: "


async def kill_on_second(signals: AsyncIterator[signal.Signals], kill: Callable[[], None]) -> None:
    """Kills when a signal comes once more."""
    await anext(signals)
    kill()


class CanNotStart(NanoInferenceError):
    """A child has said why trying again would not help."""


class Printer:
    """Writes what children print, and what is said of them, to standard error."""

    def __init__(self, models: Sequence[str] = (), stream: TextIO | None = None) -> None:
        """Args: where there are several models, their ids, for which there is a column then; where
        to write (None: standard error)."""
        # Drops lines rather than wait or fail: the pipeline is worth more than a line.
        output = LogOutput(
            stream or sys.stderr, lambda lines: f"up         {lines} lines were dropped\n"
        )
        self._console = Console(file=cast(TextIO, output), highlight=False, soft_wrap=True)
        self._several = bool(models)
        self._width = max(map(len, models), default=0)

    def say(self, text: str, model: str = "") -> None:
        """A line of ours."""
        self._write(Text(f"{self._of(model)}up         ", style="bold") + Text(text))

    def line(self, model: str, role: str, line: Line) -> None:
        """A line of a child."""
        start = f"{self._of(model)}{role:<10} "
        self._write(Text(start, style=_STYLES[split_role(role)[0]]) + Text(str(line)))

    def _of(self, model: str) -> str:
        return f"{model:<{self._width}} " if self._several else ""

    def _write(self, text: Text) -> None:
        self._console.print(text)


class Identity(NamedTuple):
    """What processes are told to run as.

    Attributes:
        config: The settings of these processes.
        arguments: What makes each of them read the same.
        metrics_ports: For each, in the order of their roles; none where there are no metrics.
    """

    config: Config
    arguments: tuple[str, ...] = ()
    metrics_ports: tuple[int, ...] = ()


class Processes:
    """Some processes with a role each: those of a lane, the gateway's."""

    def __init__(
        self, identity: Identity, roles: Iterable[str], forks: Forks, printer: Printer
    ) -> None:
        self._config = identity.config
        self._arguments = ("--with-parent", *identity.arguments)
        self._metrics_ports = identity.metrics_ports
        self.roles = tuple(roles)
        self._model = identity.config.bus.model
        self._forks = forks
        self._printer = printer
        self._children: dict[str, Child] = {}
        # With which sentence each has ended.
        self._complaints: dict[str, str] = {}
        # Replicas of which a stage has used up its restarts.
        self._given_up: set[int] = set()
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Those that run."""
        return [child.pid for child in self._children.values() if child.returncode is None]

    async def run(self) -> None:
        """Runs them until they are stopped.

        Raises:
            StageFailed: A child has used up its restarts, and no replica can do without it.
            CanNotStart: A child has said why it can't.
        """
        try:
            async with anyio.create_task_group() as group:
                for role in self.roles:
                    group.start_soon(self._keep_running, role)
        except* NanoInferenceError as failures:
            raise _first(failures) from None

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
                raise CanNotStart(self._why_not(role))
            try:
                wait_s = budget.failed(time.monotonic())
            except StageFailed as error:
                self.give_up(role, error)
                await self._tell_of_end(role)
                return
            self._say(f"{role} ended with status {status}; starting it again in {wait_s:g} s")
            await self._tell_of_end(role)
            await anyio.sleep(wait_s)

    def _why_not(self, role: str) -> str:
        said = self._complaints.get(role, "")
        if self._model and said:
            return said
        return f"the {role} stage can't start; it says why above"

    def give_up(self, role: str, error: StageFailed) -> None:
        """Goes on without a replica, as long as there are others. Raises the error if not."""
        stage, replica = split_role(role)
        self._given_up.add(replica)
        if stage not in REPLICATED or len(self._given_up) == self._config.pipeline.replicas:
            raise error
        self._say(f"{error.message}; the other replicas go on without it")

    async def _tell_of_end(self, role: str) -> None:
        """Tells admission what a process that was killed could not: others take over its work."""
        if self._config.pipeline.replicas == 1 or role == GATEWAY:
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
        child = self._children[role] = await self._forks.start(role, self._command(role))
        if self._stopping:  # while it was started
            child.send_signal(signal.SIGTERM)
        lines = Lines()
        async with contextlib.aclosing(child.output()) as output:
            async for chunk in output:
                for line in lines.feed(chunk):
                    self._print(role, line)
                    await anyio.lowlevel.checkpoint()  # a flood of one leaves others their turn
        for line in lines.end():
            self._print(role, line)
        status = await child.wait()
        self._forks.ended(child)
        return status

    def _command(self, role: str) -> list[str]:
        """The arguments of `nano-inference`."""
        if role == GATEWAY:
            command = ["gateway", *self._arguments]
        else:
            stage, replica = split_role(role)
            command = ["run", *self._arguments, "--stages", stage]
            if stage in REPLICATED:
                command += ["--set", f"pipeline.replica={replica}"]
        if self._metrics_ports:
            number = self._metrics_ports[self.roles.index(role)]
            command += ["--set", f"telemetry.metrics_port={number}"]
        return command

    async def stop(self, *, drain: bool = False) -> None:
        """Ends them, the gateway first, which lets its calls end, then admission, while the others
        work.

        Args:
            drain: Whether admission shall let requests in flight finish.
        """
        self._stopping = True
        limit_s = self._config.pipeline.drain_timeout_s + STOP_S
        await self._stop(GATEWAY, limit_s)
        await self._stop("admission", limit_s if drain else STOP_S, drain=drain)
        async with anyio.create_task_group() as group:
            for role in self.roles:
                group.start_soon(self._stop, role, STOP_S)

    async def _stop(self, role: str, limit_s: float, *, drain: bool = False) -> None:
        child = self._children.get(role)
        if child is None:
            return
        if child.returncode is None:
            await self._end(role, child, limit_s, drain=drain)
        self._forks.ended(child)

    async def _end(self, role: str, child: Child, limit_s: float, *, drain: bool) -> None:
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

    def kill(self) -> None:
        """Ends all of them at once."""
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    def _say(self, text: str) -> None:
        self._printer.say(text, self._model)

    def _print(self, role: str, line: Line) -> None:
        text = str(line)
        if text.startswith(_COMPLAINT):
            self._complaints[role] = text.removeprefix(_COMPLAINT)
        self._printer.line(self._model, role, line)


def _first(failures: BaseExceptionGroup[NanoInferenceError]) -> NanoInferenceError:
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
