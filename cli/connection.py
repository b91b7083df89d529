"""Connections of commands to a pipeline in other processes, over its bus or at a server."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.to_thread
from msgspec.structs import replace

from ..config import DEFAULT_URL, BusConfig, BusError, Config, ConfigError, shown
from ..pipeline.client import BusClient
from ..telemetry import Metrics, setup_metrics, setup_tracing
from .options import Options
from .running import Running, found
from .terminal import complain

C = TypeVar("C")
T = TypeVar("T")

STARTING_S = 3.0
"""From the start of `up` to its registration, on a loaded machine."""

_LOOK_S = 0.1

SERVE_PORT = 8000
"""Default port of `serve`; that of vLLM and other OpenAI-compatible servers."""

ROOT = f"http://127.0.0.1:{SERVE_PORT}"

DEFAULT_SERVER = f"{ROOT}/v1"


class ServerAddress(NamedTuple):
    """A server: the URL of its OpenAI interface, without a slash at its end, and the key for it.

    `typed`: Its URL as the user typed it.
    """

    url: str
    api_key: str = ""
    typed: str = ""


Target = ServerAddress | Config
"""A server, or the settings of the bus."""


def target_of(options: Options, *, or_serve: bool = False) -> Target:
    """Return the server of --url, else the bus of the settings, else what runs on this machine.

    Several that run: the newest that serves --model, with a note on standard error. None that runs:
    the default bus of `up`. Logging is set up.

    Args:
        options: The options.
        or_serve: Whether a server is preferred to its bus, and the default is that of `serve`.

    Raises:
        ConfigError: There are --url and --bus, or the URL is malformed; or the bus of what runs
            needs a password.
    """
    if options.url is not None and options.bus is not None:
        raise ConfigError("give --url or --bus, and not both")
    config = options.client_config()
    if options.url is not None:
        return server_of(options)
    if options.bus is not None or options.config().bus.url != "memory":
        return config
    if (running := _newest(options.served)) is None:
        return server_of(options) if or_serve else config
    return found_target(running, options, or_serve=or_serve)


def found_target(running: Running, options: Options, *, or_serve: bool = False) -> Target:
    """Return the address of what runs: its bus, if commands reach that, else its server.

    Arguments and errors are those of `target_of`.
    """
    by_bus = running.bus is not None and running.command == "up" and not running.secret
    if running.url is not None and (or_serve or not by_bus):
        return server_of(replace(options, url=running.url))
    if running.secret:
        raise ConfigError(
            f"the bus of `{running.command}` (process {running.pid}) is {running.bus} with a "
            "password or options; give its whole URL as NANO_INFERENCE_BUS__URL, or with --bus"
        )
    config = options.client_config()
    bus = {"url": running.bus or config.bus.url, "prefix": running.prefix}
    return replace(config, bus=replace(config.bus, **bus))


async def target_begun(options: Options) -> Target:
    """As `target_of`, for a command that may come right after `up &`: where nothing answers and
    nothing is registered, it waits for a registration, for at most `STARTING_S`."""
    target = target_of(options)
    if isinstance(target, ServerAddress) or target.bus.url != DEFAULT_URL:
        return target
    if options.bus is not None or found():
        return target
    give_up_at = time.monotonic() + STARTING_S
    async with aclosing(BusClient.connect(target.bus)) as client:
        while time.monotonic() < give_up_at:
            if begun := found():
                complain(f"waiting: `{begun[0].command}` (process {begun[0].pid}) is starting")
                return target_of(options)
            try:
                await client.bus.ping()
                break
            except BusError:  # also for its password, which is known once it is registered
                await anyio.sleep(_LOOK_S)
    return target


def running_server(options: Options) -> ServerAddress | None:
    """Return the newest server that runs on this machine; None if none does.

    Raises:
        ConfigError: A pipeline runs, and no server.
    """
    if (running := _newest(None, by_http=True)) is not None:
        return server_of(replace(options, url=running.url))
    if every := found():
        raise ConfigError(
            f"`{every[0].command}` (process {every[0].pid}) has no HTTP; start it with --gateway, "
            f"or `nano-inference gateway --bus {every[0].bus}` beside it"
        )
    return None


def _newest(model: str | None, *, by_http: bool = False) -> Running | None:
    """Return what commands without an address use: the newest that runs, with this model if any
    has it."""
    every = [each for each in found() if each.url or not by_http]
    several = [each for each in every if model in each.models] or every
    if len(several) > 1:
        newest = several[0]
        complain(
            f"{len(several)} are running; this goes to the newest, {newest.url or newest.bus} "
            f"(`{newest.command}`, process {newest.pid}); --url or --bus names another"
        )
    return several[0] if several else None


def server_of(options: Options) -> ServerAddress:
    """Return the server of --url. The path of OpenAI's interface is `/v1` if the URL has none.

    Raises:
        ConfigError: The URL is malformed.
    """
    url = options.url or DEFAULT_SERVER
    if (parts := web_address(url if "://" in url else f"http://{url}")) is None:
        raise ConfigError(f"--url is {shown(url)}; it must be such as {DEFAULT_SERVER}")
    path = parts.path.rstrip("/") or "/v1"
    url = parts._replace(path=path, query="", fragment="").geturl()
    return ServerAddress(url, options.api_key or "", options.url or "")


def web_address(url: str) -> SplitResult | None:
    """Return the parts of an http(s) URL; None for anything else."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc:
            return parts
    return None


@asynccontextmanager
async def connected(
    config: Config,
    model: str | None = None,
    *,
    name: str = "client",
    wait_for_bus: bool = False,
    with_metrics: bool = False,
) -> AsyncIterator[BusClient]:
    """Connect a client to the pipeline at `config.bus`, with tracing as configured.

    Args:
        config: The settings.
        model: One of several models, by one of its names; None for the whole deployment.
        name: Identifies this process in traces and metrics.
        wait_for_bus: Start even if the bus is unreachable.
        with_metrics: Expose metrics of this process, on a port or as a gateway, as configured.

    Raises:
        BusError: The bus can't be reached.
        ConfigError: The port for the metrics is taken.
        RequestError: unknown_model.
    """
    instance = f"{name}-{socket.gethostname()}-{os.getpid()}"
    metrics = Metrics()
    if with_metrics:
        metrics = setup_metrics(config.telemetry, instance, without_port=config.gateway.metrics)
    tracing = setup_tracing(config.telemetry, instance)
    client = BusClient.connect(config.bus, tracing, metrics)
    try:
        if not wait_for_bus:
            await _until_it_answers(client, config.bus)
        id = client.bus.model if model is None else await client.deployment.find(model)
        if id == client.bus.model:
            yield client
        else:
            async with client.of_model(id) as of_model:
                yield of_model
    finally:
        await client.aclose()
        tracing.shutdown()
        await anyio.to_thread.run_sync(metrics.shutdown, limiter=anyio.CapacityLimiter(1))


async def _until_it_answers(client: BusClient, bus: BusConfig) -> None:
    """Wait for a bus, a while if an `up` of this user has just begun to start it."""
    while True:
        try:
            await client.bus.ping()
            return
        except BusError as error:
            if (age_s := _starting_for(bus)) is None or age_s > STARTING_S:
                raise unreachable(bus, error) from None
        await anyio.sleep(_LOOK_S)


def _starting_for(bus: BusConfig) -> float | None:
    """Return the seconds since the start of this user's `up` on a bus; None without one."""
    starts = [each.started_at for each in found() if (each.command, each.bus) == ("up", bus.url)]
    return time.time() - max(starts) if starts else None


def run_with(context: AbstractAsyncContextManager[C], work: Callable[[C], Awaitable[T]]) -> T:
    """Enter a context in an event loop, and return the result of the work with it."""

    async def run() -> T:
        async with context as entered:
            return await work(entered)

    return asyncio.run(run())


def system_reason(error: BaseException) -> str:
    """Return the system's reason behind an error, as "connection refused"; "" if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):  # its numbers are OpenSSL's
        number = cause.errno if isinstance(cause, OSError) else None
        if number is not None and number in errno.errorcode:
            return os.strerror(number).lower()
        cause = cause.__cause__ or cause.__context__
    return ""


def unreachable(bus: BusConfig, error: BusError) -> BusError:
    """Return the error, for the default bus with advice for someone who has started nothing."""
    if bus.url != DEFAULT_URL or "can't reach" not in str(error):
        return error
    return BusError(
        f"no pipeline at {DEFAULT_URL}; start one with `nano-inference up`, or a server with "
        f"`nano-inference serve`; --bus or --url, as {ROOT}, names another"
    )
