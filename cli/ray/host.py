"""The Ray actor: it runs one process of the pipeline, as `up` runs its processes.

The process is a child of the actor's worker. It ends with it, and its standard output and error are
the worker's, where `ray logs` and the dashboard find them. The child is restarted here, within the
budget of `pipeline.max_restarts`. Ray restarts the actor after the loss of its process or node, and
once that budget is used up.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from importlib import metadata
from typing import Any

import anyio
import msgspec
import ray
from ray.util import get_node_ip_address

from ...bus import open_bus
from ...config import (
    Config,
    ConfigError,
    NanoInferenceError,
    as_environment,
    load_config,
    redact,
)
from ...config.load import ENV_PREFIX
from ...pipeline.supervisor import LONGEST_WAIT_S, StageFailed
from ...telemetry import LogOutput
from ..children import Forks
from ..model_files import check_model_files
from ..processes import GATEWAY, CanNotStart, Printer, Processes
from .plan import ActorPlan

_SAME = ("nano-inference", "torch", "transformers", "tokenizers")
"""Packages whose versions must be the same on all nodes: of messages, or of results' bits."""

_BUS_LIMIT_S = 20.0

_LAST_LOOK_S = 5.0
"""For the driver to read why an actor leaves."""

_EVERY_ADDRESS = ("0.0.0.0", "::", "")


class ActorState(msgspec.Struct, frozen=True):
    """The state of an actor's process.

    Attributes:
        node: Address of its node.
        pid: Id of the process; 0 while none runs.
        places: Its addresses: `http`, `grpc`, `metrics`.
        failure: Why it is not started again; "" while it runs.
    """

    node: str
    pid: int
    places: dict[str, str]
    failure: str = ""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    found = {"Python": platform.python_version()}
    for package in _SAME:
        # A CPU node and a GPU node may have builds of one version.
        found[package] = metadata.version(package).partition("+")[0]
    return found


def check_node(wanted: dict[str, str], settings: dict[str, Any]) -> str:
    """Return why a process of the pipeline can't run on this node; "" if it can.

    Args:
        wanted: The driver's `versions`.
        settings: Settings of the pipeline.
    """
    node = f"node {get_node_ip_address()} ({socket.gethostname()})"
    if problem := _different(wanted):
        return f"{node} {problem}"
    config = load_config(env=as_environment(settings, {}))
    try:
        check_model_files(config, None)
        anyio.run(_reach_bus, config)
    except NanoInferenceError as error:
        return f"{node}: {error}"
    return ""


def _different(wanted: dict[str, str]) -> str:
    try:
        found = versions()
    except metadata.PackageNotFoundError as error:
        return f"has no package {error.name}; install the same packages on all nodes"
    different = [name for name in wanted if found.get(name) != wanted[name]]
    if not different:
        return ""
    both = ", ".join(f"{name} {found.get(name)} and not {wanted[name]}" for name in different)
    return f"has {both}; install the same versions on all nodes"


async def _reach_bus(config: Config) -> None:
    async with aclosing(open_bus(config.bus)) as bus:
        with anyio.move_on_after(_BUS_LIMIT_S):
            await bus.ping()
            return
    raise ConfigError(
        f"no answer from {redact(config.bus.url)} within {_BUS_LIMIT_S:g} s",
        remedy="check that it runs, and that this node reaches it",
    )


class _WorkerPrinter(Printer):
    """Writes lines as they are to the worker's log: Ray shows the actor's name before each."""

    def __init__(self) -> None:
        self._output = LogOutput(sys.stdout, lambda lines: f"{lines} lines were dropped\n")

    def say(self, text: str, model: str = "") -> None:
        self._output.write(f"up: {text}\n")

    def line(self, model: str, role: str, line: str) -> None:
        self._output.write(f"{line}\n")


class StageHost:
    """An actor that runs one process of the pipeline, from its construction on."""

    def __init__(self, plan: ActorPlan, settings: dict[str, Any], wanted: dict[str, str]) -> None:
        """Args: its plan, the pipeline's settings, the versions that all nodes must have."""
        self._plan = plan
        self._wanted = wanted
        # Unlike the actor's id, it differs between two processes of one actor.
        self._token = uuid.uuid4().hex
        self._node = get_node_ip_address()
        # The node's own settings would differ from those of other nodes.
        plain = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self._settings = settings | plan.settings
        config = load_config(env=as_environment(self._settings, {}))
        self._places: dict[str, str] = {}
        if plan.role == GATEWAY:
            self._settings |= self._ports(config)
        if port := config.telemetry.metrics_port:
            self._places["metrics"] = self._place(config.telemetry.metrics_host, port)
        self._config = load_config(env=as_environment(self._settings, {}))
        self._environment = as_environment(self._settings, plain)
        self._processes: Processes
        self._loop: asyncio.AbstractEventLoop
        self._failure = ""
        self._stopping = False
        self._began = threading.Event()
        threading.Thread(target=self._run, name="processes", daemon=True).start()
        self._began.wait()

    def __repr__(self) -> str:
        """The role, which Ray writes before each line of this actor's log."""
        return self._plan.name.rpartition("/")[2]

    # --- called by the driver -------------------------------------------------------------------

    def state(self) -> ActorState:
        """Return the process's state."""
        pid = next(iter(self._processes.pids), 0)
        return ActorState(self._node, pid, self._places, self._failure)

    def stop(self, drain: bool) -> None:
        """Stop the process for good, and wait for its end; `drain`: of admission, as of `up`."""
        self._stopping = True
        with suppress(RuntimeError, CancelledError):  # the process has ended, and so the loop
            stopping = self._processes.stop(drain=drain)
            asyncio.run_coroutine_threadsafe(stopping, self._loop).result()

    # --- called by itself -----------------------------------------------------------------------

    def leave(self, token: str) -> None:
        """End this actor, so that Ray doesn't start it again.

        Args:
            token: Token of the calling process. After a node was taken for dead the call may reach
                the actor's newer process, which stays.
        """
        if token == self._token:
            ray.actor.exit_actor()

    # --- inside ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            anyio.run(self._run_processes)
        except StageFailed as error:
            self._end(str(error))
        except NanoInferenceError as error:
            self._failure = str(error)
            self._print(f"{error}; the actor leaves, and is not started again")
            time.sleep(_LAST_LOOK_S)
            this = ray.get_runtime_context().current_actor
            this.leave.remote(self._token)
        except BaseException as error:  # noqa: BLE001  the thread is all that this actor does
            self._end(repr(error))
        finally:
            self._began.set()

    async def _run_processes(self) -> None:
        self._loop = asyncio.get_running_loop()
        printer = _WorkerPrinter()
        roles = [self._plan.role]
        method = self._config.pipeline.start_method
        forks = Forks(roles, method, self._environment, printer.say)
        self._processes = Processes(self._config, roles, forks, printer)
        self._began.set()
        try:
            if problem := _different(self._wanted):
                raise CanNotStart(f"node {self._node} {problem}")
            await self._processes.run()
            if not self._stopping:
                # Of a replica, which `up` goes on without.
                raise StageFailed(f"{self._plan.role} has used up its restarts")
        finally:
            forks.close()

    def _end(self, reason: str) -> None:
        """End this worker; Ray starts the actor again."""
        self._print(f"{reason}; Ray starts the actor again in {LONGEST_WAIT_S:g} s")
        time.sleep(LONGEST_WAIT_S)
        os._exit(1)

    def _print(self, text: str) -> None:
        _WorkerPrinter().say(text)

    def _ports(self, config: Config) -> dict[str, Any]:
        """Choose this gateway's ports on this node."""
        from ...gateway.gateway import DEFAULT_PORT  # other stages need no web server

        gateway, number = config.gateway, self._plan.number
        host = gateway.host
        ports: dict[str, Any] = {
            "gateway.port": _free(host, (gateway.port or DEFAULT_PORT) + number)
        }
        scheme = "https" if gateway.tls_certificate else "http"
        self._places["http"] = f"{scheme}://{self._place(host, ports['gateway.port'])}"
        if (grpc := gateway.grpc_port) is not None:
            ports["gateway.grpc_port"] = _free(host, grpc and grpc + number)
            self._places["grpc"] = self._place(host, ports["gateway.grpc_port"])
        return ports

    def _place(self, host: str, port: int) -> str:
        address = self._node if host in _EVERY_ADDRESS else host
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _free(host: str, wanted: int) -> int:
    """Return the wanted port of this node, or another one if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    raise ConfigError(
        f"gateway.host {host} is no address of this node",
        remedy="give an address that it has, or 0.0.0.0",
    )
