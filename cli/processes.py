"""Processes of one lane, or the gateway's: each is restarted when it ends, and all are stopped."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
from rich.console import Console
from rich.text import Text

from ..bus import open_bus
from ..bus.control import StageStopped
from ..bus.links import CONTROL
from ..config import REPLICATED, BusError, Config, NanoInferenceError, role_of, split_role
from ..config.errors import leaves_of
from ..pipeline.supervisor import RestartBudget, StageFailed
from ..store.board import Restarts
from ..store.process_state import identity_of, state_of
from ..telemetry import LogOutput
from .children import Child, Forks
from .occupied import successor
from .process import DRAIN, TAKE_OVER
from .terminal import PROGRAM, STAGE_STYLES, json_line, show_loading

GATEWAY = "gateway"
"""The role of the process that runs no stage."""

STOP_S = 10.0
"""From SIGTERM to SIGKILL, for children that need not drain."""

MOST_LINE_BYTES = 1 << 16
"""Shown bytes of a child's line. Our log lines are shorter (`telemetry.logs.MOST_LOG_BYTES`)."""

_STYLES = {**STAGE_STYLES, GATEWAY: "white"}
# Exit statuses of children; see app.py. A restart is useless, unless it has run before.
_CAN_NOT_START, _REPLACED = 2, 3
# Exit statuses after SIGTERM: before and after the child handles it.
_TERMINATED = (-signal.SIGTERM, 0)
# Time limit for the message to admission that a process has ended.
_REPORT_S = 1.0
# Seconds until a process that was taken from its place has a new standby, which does not compete
# with the recovery then; and until there is another attempt after one has failed.
_STANDBY_DELAY_S, _STANDBY_RETRY_S = 1.0, 10.0
# Longest wait for the last lines of a process that has ended, if its children hold its output.
_LAST_LINES_S = 0.5
# Seconds between two looks at an executor whose model has several ranks.
_POLL_S = 0.25
# Prefix of a command's last sentence; see `terminal.complain`.
_COMPLAINT = f"{PROGRAM}: "

# ESC starts a control sequence, an operating system command, or something shorter.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class CanNotStart(NanoInferenceError):
    """A child has printed why a restart is useless."""


class Lines:
    """Splits bytes into lines of text without control codes, with at most `most` bytes in memory.

    A line that is longer ends with the number of bytes that are left out.
    """

    def __init__(self, most: int = MOST_LINE_BYTES) -> None:
        self._most = most
        self._kept = bytearray()
        self._left_out = 0

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that end in these bytes."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield self._take()
        self._add(rest)

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        if self._kept or self._left_out:
            yield self._take()

    def _add(self, part: bytes) -> None:
        kept = part[: self._most - len(self._kept)]
        self._kept += kept
        self._left_out += len(part) - len(kept)

    def _take(self) -> str:
        line = without_controls(self._kept.decode(errors="replace"))
        if self._left_out:
            line += f"... ({self._left_out} more bytes left out)"
        self._kept.clear()
        self._left_out = 0
        return line


def without_controls(text: str) -> str:
    """Return a text without colours and control codes, so that it can't steer the terminal."""
    return _CONTROLS.sub(" ", _ESCAPES.sub("", text)).rstrip(" ")


class Printer:
    """Writes lines of `up` and of its children to standard error."""

    def __init__(
        self,
        models: Sequence[str] = (),
        stream: TextIO | None = None,
        *,
        as_json: bool = False,
    ) -> None:
        """Make a printer.

        Args:
            models: The ids of several models, which get a column.
            stream: The output; None for standard error.
            as_json: Whether each line is a JSON object with the `process` that it is of, and of
                several models the `model`.
        """
        self._as_json = as_json

        def notice(lines: int) -> str:
            said = f"{lines} lines were dropped"
            if as_json:
                return json_line(said, level="warning", process="up")
            return f"up         {said}\n"

        # Drops lines rather than wait or fail, since the pipeline is more important.
        stream = stream or sys.stderr
        self._output = LogOutput(stream, notice)
        # Also shows bars, whose frames a kept log must not have.
        shown = cast(TextIO, LogOutput(stream, notice, copied=False))
        self._console = Console(file=shown, highlight=False, soft_wrap=True)
        self._copied = Console(
            force_terminal=self._console.is_terminal, highlight=False, soft_wrap=True
        )
        self._width = max(map(len, models)) + 1 if models else 0

    async def show_loading(self, config: Config, given_up: Callable[[], Iterable[str]]) -> None:
        """Show how far the models are loaded below the lines, on a terminal.

        Args:
            config: The pipeline's config.
            given_up: Returns executors that are not started again.
        """
        if self._console.is_terminal:
            with contextlib.suppress(NanoInferenceError):
                async with contextlib.aclosing(open_bus(config.bus)) as bus:
                    replicas = config.pipeline.replicas
                    await show_loading(bus.store.board.read, replicas, self._console, given_up)

    def say(self, text: str, model: str = "") -> None:
        """Write a line of `up`."""
        if self._as_json:
            self._output.write(json_line(text, level="info", **_where("up", model)))
            return
        self._print(Text(f"{model:<{self._width}}up         ", "bold") + Text(text))

    def line(self, model: str, role: str, line: str) -> None:
        """Write a line of a child."""
        if self._as_json:
            try:
                # Mostly a line of its log.
                found = msgspec.json.decode(line, type=dict[str, Any])
                text = msgspec.json.encode(_where(role, model) | found).decode() + "\n"
            except ValueError:
                level = "error" if line.startswith(_COMPLAINT) else "info"
                text = json_line(line, level=level, **_where(role, model))
            self._output.write(text)
            return
        start = f"{model:<{self._width}}{role:<10} "
        self._print(Text(start, _STYLES[split_role(role)[0]]) + Text(line))

    def _print(self, line: Text) -> None:
        self._console.print(line)
        if LogOutput.copy is not None:
            with self._copied.capture() as captured:
                self._copied.print(line)
            LogOutput.copy(captured.get())


def _where(process: str, model: str) -> dict[str, str]:
    return {"process": process, **({"model": model} if model else {})}


@dataclass(eq=False)
class Running:
    """A child whose output is printed.

    Attributes:
        child: The process.
        printed: Set when all of its output is printed.
        left: Set when it is no standby any more: it took over, or has ended.
    """

    child: Child
    printed: anyio.Event = field(default_factory=anyio.Event)
    left: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False)
class Processes:
    """Processes with a role each: those of a lane, the gateway's.

    Attributes:
        config: Their settings.
        roles: One for each process.
        forks: Starts them.
        printer: Prints their lines.
        arguments: Options with which each of them reads the same settings.
        metrics_ports: For each role; empty without metrics.
    """

    config: Config
    roles: Sequence[str]
    forks: Forks
    printer: Printer
    arguments: Sequence[str] = ()
    metrics_ports: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._model = self.config.bus.model
        self._children: dict[str, Child] = {}
        self._standbys: dict[str, Running] = {}
        # Prints the standbys' output.
        self._group: anyio.abc.TaskGroup
        # The last complaint of each child.
        self._complaints: dict[str, str] = {}
        # Replicas of which a stage has used up its restarts.
        self._given_up: set[int] = set()
        # Whether a stage is missing for good, so that no request in flight can finish.
        self._is_lost = False
        self._stopping = False
        self._restarts = dict.fromkeys(self.roles, Restarts())

    @property
    def pids(self) -> list[int]:
        """The running processes."""
        return [child.pid for child in self._children.values() if child.returncode is None]

    def given_up(self) -> list[str]:
        """Return the executors of replicas that run no more."""
        return [role_of("executor", replica) for replica in self._given_up]

    async def run(self) -> None:
        """Run the processes until they are stopped.

        Raises:
            StageFailed: A child has used up its restarts, and no replica can replace it.
            CanNotStart: A child has printed why it can't start.
        """
        try:
            async with anyio.create_task_group() as self._group:
                async with anyio.create_task_group() as group:
                    for role in self.roles:
                        group.start_soon(self._keep_running, role)
                        if split_role(role)[0] in self.config.pipeline.standby:
                            self._group.start_soon(self._keep_standby, role)
                self._group.cancel_scope.cancel()
        except* NanoInferenceError as failures:
            raise leaves_of(failures)[0] from None

    async def _keep_running(self, role: str) -> None:
        budget, has_run = RestartBudget(role, self.config.pipeline), False
        while not self._stopping:
            status = await self._run_once(role)
            if self._stopping:
                return
            if status in _TERMINATED:
                self._say(f"{role} was terminated; starting its successor")
                self._restarts[role] = self._restarts[role].after("it was terminated")
                has_run = True
                continue
            if status == _REPLACED:
                other = await successor(self.config.bus, role, self._children[role].pid)
                raise CanNotStart(
                    f"this pipeline was replaced by {other or 'another one'}, which serves lane "
                    f"{self.config.bus.lane}; give each pipeline a bus.lane of its own"
                )
            if status == _CAN_NOT_START and not has_run:
                complaint = self._complaints.get(role, "") if self._model else ""
                raise CanNotStart(complaint or f"the {role} stage can't start; its reason is above")
            has_run = True
            try:
                wait_s = budget.failed(time.monotonic())
            except StageFailed as error:
                self.give_up(role, error)
                await self._report_end(role)
                return
            self._restarts[role] = self._restarts[role].after(self._cause(role, status))
            if role in self._standbys:
                self._say(f"{role} ended with status {status}; its standby takes over")
                await self._report_end(role)
                continue
            self._say(f"{role} ended with status {status}; restarting it in {wait_s:g} s")
            await self._report_end(role)
            await anyio.sleep(wait_s)

    def _cause(self, role: str, status: int) -> str:
        """Return why a process has ended."""
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        return self._complaints.pop(role, "") or f"it ended with status {status}"

    def give_up(self, role: str, error: StageFailed) -> None:
        """Continue without a replica, while there are others. Raises the error if not."""
        stage, replica = split_role(role)
        self._given_up.add(replica)
        if stage not in REPLICATED or len(self._given_up) == self.config.pipeline.replicas:
            self._is_lost = True
            self._say(f"giving up, stopping: {error}")
            raise error
        self._say(f"{error}; the other replicas continue without it")

    async def _report_end(self, role: str) -> None:
        """Report to admission that a process has ended, so that other replicas take its work."""
        if self.config.pipeline.replicas == 1 or role == GATEWAY:
            return  # only a successor takes its work, and reports itself
        bus = open_bus(self.config.bus)
        try:
            with anyio.move_on_after(_REPORT_S):
                sender = bus.sender(CONTROL["admission"], "up")
                await sender.send(StageStopped(role, "", "its process ended"))
                await sender.flush()
        except BusError as error:
            self._say(f"the end could not be reported to admission: {error}")
        finally:
            with anyio.move_on_after(_REPORT_S):
                await bus.aclose()

    async def _run_once(self, role: str) -> int:
        running = await self._next(role)
        child = self._children[role] = running.child
        if self._stopping:  # meanwhile
            child.send_signal(signal.SIGTERM)
        async with anyio.create_task_group() as group:
            if not running.left.is_set():  # no former standby, whose output is printed already
                group.start_soon(self._print_output, role, running)
            if split_role(role)[0] == "executor" and self.config.engine.num_ranks > 1:
                group.start_soon(self._kill_if_stopped, role, child)
            status = await child.wait()
            with anyio.move_on_after(_LAST_LINES_S):
                await running.printed.wait()
            group.cancel_scope.cancel()
        self.forks.ended(child)
        return status

    async def _next(self, role: str) -> Running:
        """Return the role's standby, which takes over, or a new process."""
        standby = self._standbys.pop(role, None)
        if standby is not None and standby.child.returncode is None:
            await standby.child.tell(TAKE_OVER)
            standby.left.set()
            return standby
        return await self._start(role)

    async def _start(self, role: str, *more: str) -> Running:
        return Running(await self.forks.start(role, [*self._command(role), *more]))

    async def _keep_standby(self, role: str) -> None:
        """Start the next standby whenever one has taken over, or has ended."""
        delay_s = _STANDBY_DELAY_S
        while True:
            await anyio.sleep(delay_s)
            if self._stopping:
                return
            # When it takes over, that is one more.
            restarts = self._restarts[role].after("its standby took over")
            given = ("--restarted", msgspec.json.encode(restarts).decode())
            standby = self._standbys[role] = await self._start(role, "--standby", *given)
            self._group.start_soon(self._print_output, role, standby)
            await standby.left.wait()
            delay_s = _STANDBY_DELAY_S
            if self._standbys.get(role) is standby:
                del self._standbys[role]
                status = await standby.child.wait()
                self.forks.ended(standby.child)
                delay_s = _STANDBY_RETRY_S
                if not self._stopping:
                    self._say(f"the standby of {role} ended with status {status}")

    async def _print_output(self, role: str, running: Running) -> None:
        lines = Lines()
        async with contextlib.aclosing(running.child.output()) as output:
            async for chunk in output:
                for line in lines.feed(chunk):
                    self._print(role, line)
                    await anyio.lowlevel.checkpoint()  # one child's output must not delay others
        for line in lines.end():
            self._print(role, line)
        running.printed.set()
        running.left.set()

    async def _kill_if_stopped(self, role: str, child: Child) -> None:
        """Kill an executor, rank 0 of a model, that is stopped (SIGSTOP) for
        `engine.rank_timeout_s`: the other ranks wait no longer for it."""
        process, timeout_s = identity_of(child.pid), self.config.engine.rank_timeout_s
        # Counted, since this process may have been stopped meanwhile.
        left = most = math.ceil(timeout_s / _POLL_S)
        while left:
            await anyio.sleep(_POLL_S)
            left = left - 1 if state_of(child.pid, process) == "stopped" else most
        self._say(f"{role} is stopped for {timeout_s:g} s (engine.rank_timeout_s); killing it")
        child.send_signal(signal.SIGKILL)

    def _command(self, role: str) -> list[str]:
        """Return the arguments of `nano-inference`."""
        stage, replica = split_role(role)
        command = ["gateway" if role == GATEWAY else "run", "--with-parent", *self.arguments]
        if role != GATEWAY:
            restarted = msgspec.json.encode(self._restarts[role]).decode()
            command += ["--stages", stage, "--restarted", restarted]
        if stage in REPLICATED:
            command += ["--set", f"pipeline.replica={replica}"]
        if self.metrics_ports:
            number = self.metrics_ports[self.roles.index(role)]
            command += ["--set", f"telemetry.metrics_port={number}"]
        return command

    async def stop(self, *, drain: bool = False) -> None:
        """Stop the gateway, which ends its calls, then admission, then the others.

        Args:
            drain: Whether admission waits for requests in flight. It doesn't without a stage that
                has used up its restarts, for which they would wait in vain.
        """
        self._stopping = True
        drain = drain and not self._is_lost
        for standby in self._standbys.values():
            standby.child.send_signal(signal.SIGTERM)
        limit_s = self.config.pipeline.drain_timeout_s + STOP_S
        if not self._is_lost:
            await self._stop(GATEWAY, limit_s)
        await self._stop("admission", limit_s if drain else STOP_S, drain=drain)
        async with anyio.create_task_group() as group:
            for role in self.roles:
                group.start_soon(self._stop, role, STOP_S)
            for standby in self._standbys.values():
                group.start_soon(standby.child.wait)

    async def _stop(self, role: str, limit_s: float, *, drain: bool = False) -> None:
        if (child := self._children.get(role)) is None:
            return
        if child.returncode is None:
            if drain:
                await child.tell(DRAIN)
            else:
                child.send_signal(signal.SIGTERM)
            with anyio.move_on_after(limit_s) as scope:
                await child.wait()
            if scope.cancelled_caught:
                self._say(f"{role} does not stop; killing it")
                child.send_signal(signal.SIGKILL)
                await child.wait()
        self.forks.ended(child)

    def kill(self) -> None:
        """Kill all processes."""
        for child in (*self._children.values(), *(each.child for each in self._standbys.values())):
            child.send_signal(signal.SIGKILL)

    def _say(self, text: str) -> None:
        self.printer.say(text, self._model)

    def _print(self, role: str, line: str) -> None:
        if line.startswith(_COMPLAINT):
            self._complaints[role] = line.removeprefix(_COMPLAINT)
        self.printer.line(self._model, role, line)
