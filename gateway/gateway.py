"""A gateway on a client of the bus, listening in this process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from ipaddress import ip_address
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import msgspec

from ..config import BusError, Config, ConfigError
from ..config.logger import get_logger
from ..pipeline.client import BusClient

if TYPE_CHECKING:
    from .api.kserve.grpc_server import GrpcServer
    from .api.kserve.service import KServe
    from .app import GatewayApp
    from .server.measures import Measures
    from .server.server import HttpServer

DEFAULT_PORT = 8000
"""SGLang's."""

_WARN_S = 3600.0
"""Period of the warning that the gateway is open to everybody."""


class Gateway:
    """Serves HTTP, and gRPC if `gateway.grpc_port` is set, while the context is open.

    Spans and metrics go where those of the client do.

    ```python
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        print(gateway.url)
    ```

    Attributes:
        port: The port of HTTP; a free one if `gateway.port` is 0.
        grpc_port: The port of gRPC; None without gRPC.
    """

    def __init__(self, client: BusClient, config: Config) -> None:
        self.port = config.gateway.port
        self.grpc_port = config.gateway.grpc_port
        self._client = client
        self._config = config
        self._app: GatewayApp
        self._server: HttpServer
        self._grpc: GrpcServer | None = None
        self._task: asyncio.Task[None]
        self._background: list[asyncio.Task[None]] = []

    @property
    def kserve(self) -> KServe:
        """The models and the shared memory of KServe V2, once the gateway listens."""
        return self._app.kserve

    @property
    def url(self) -> str:
        return url_of(self._config, self.port)

    @property
    def places(self) -> dict[str, str]:
        """The addresses: "url" of HTTP, and "grpc" if there is gRPC."""
        host = _host_of(self._config)
        grpc = {} if self.grpc_port is None else {"grpc": f"{host}:{self.grpc_port}"}
        return {"url": self.url} | grpc

    async def __aenter__(self) -> Gateway:
        """Listen.

        Raises:
            ConfigError: A port is taken, others could reach it without keys, or the certificate or
                the policy's settings are invalid.
            NanoInferenceError: The policy can't be read.
        """
        # Imported here, since commands that only name this class need none of it.
        from .server.measures import Measures
        from .server.server import BACKLOG, HttpServer

        place = place_of(self._config)
        listener = _bound(self._config, place, self.port, "gateway.port", BACKLOG)
        address, self.port = listener.getsockname()[:2]
        own = msgspec.structs.replace(self._config.gateway, port=self.port)
        config = msgspec.structs.replace(self._config, gateway=own)
        measures = Measures(self._client.tracing, self._client.metrics)
        try:
            self._app = app = await self._application(config, measures)
            self._server = HttpServer(app, own, measures, app.on_call)
            if config.policy.knows_callers:
                self._server.connections.client_of = app.policy.client_of
            if self.grpc_port is not None:
                # gRPC's own log has a line for each bad message, in a form of its own.
                os.environ.setdefault("GRPC_VERBOSITY", "NONE")
                from .api.kserve.grpc_server import GrpcServer

                self._grpc = GrpcServer(app.kserve, app.chain, own, self._server)
                self._grpc.listen(address)
                self.grpc_port = self._grpc.port
            await app.policy.open()
            if self._grpc is not None:
                await self._grpc.start()
        except BaseException:
            listener.close()
            if self._grpc is not None:
                await self._grpc.aclose(0)
            raise
        self._task = asyncio.create_task(self._server.serve([listener]), name="gateway")
        background = {name: work() for name, work in app.background.items()}
        background["warnings"] = self._warn_forever(address)
        self._background = [
            asyncio.create_task(work, name=name) for name, work in background.items()
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop listening. Calls in flight have a few seconds; `drain` before gives them more.

        Durable calls that haven't ended by then go on at other gateways, if their clients do.
        """
        from .server.server import LEAVE_S

        self._app.stop()
        self._server.should_exit = True
        grpc = [] if self._grpc is None else [self._grpc.aclose(LEAVE_S)]
        try:
            await asyncio.gather(asyncio.shield(self._task), *grpc)
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)
            await self._app.aclose()

    def warm_up(self) -> None:
        """Begin to load what the first calls would wait for, while the gateway listens."""
        self._background.append(asyncio.create_task(self._app.warm_up(), name="warm-up"))

    async def drain(self, timeout_s: float) -> bool:
        """Report not ready, refuse new requests, and wait for the calls in flight.

        The gateway goes on listening, so that new callers get an answer.

        Args:
            timeout_s: Longest wait.

        Returns:
            Whether all calls have ended.
        """
        self._app.kserve.readiness.draining = True
        if self._grpc is not None:
            self._grpc.drain()
        with anyio.move_on_after(timeout_s):
            await self._server.calls.idle()
            return True
        return False

    async def failed(self) -> None:
        """Wait until the server has stopped, which it does by itself only when it fails."""
        await asyncio.shield(self._task)

    async def _application(self, config: Config, measures: Measures) -> GatewayApp:
        """Return the application for one model, or for a deployment of several."""
        from .app import make_app
        from .deployment.app import DeploymentApp

        if await self._has_models():
            return DeploymentApp(self._client, config, measures)
        return make_app(self._client, config, measures)

    async def _has_models(self) -> bool:
        bus = self._client.bus
        if self._config.models or bus.model:
            return not bus.model
        try:
            return bool(await bus.store.models.read())
        except BusError:
            # As the settings say. A deployment's settings reach all of its gateways.
            return False

    async def _warn_forever(self, address: str) -> None:
        """Log what is insecure about the settings."""
        if _is_own(address):
            return
        log = get_logger()
        if self._config.policy.knows_callers:
            if not self._config.gateway.tls_certificate:
                log.warning("gateway_without_tls", meaning="keys can be read on their way here")
            return
        while True:
            log.warning("gateway_insecure", meaning="whoever reaches it may replace the weights")
            await anyio.sleep(_WARN_S)


def url_of(config: Config, port: int) -> str:
    """Return the root URL of a gateway with these settings that listens on a port."""
    scheme = "https" if config.gateway.tls_certificate else "http"
    return f"{scheme}://{_host_of(config)}:{port}"


def _host_of(config: Config) -> str:
    host = config.gateway.host
    return f"[{host}]" if ":" in host else host


def place_of(config: Config) -> tuple[socket.AddressFamily, str]:
    """Return the address on which a gateway with these settings listens.

    Raises:
        ConfigError: The name is unknown, or others could reach the address without keys.
    """
    try:
        found = socket.getaddrinfo(config.gateway.host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _can_not_listen(config, config.gateway.port, error, "gateway.port") from None
    family, address = found[0], str(found[4][0])
    if not (_is_own(address) or config.policy.knows_callers or config.gateway.insecure):
        raise ConfigError(
            f"on {config.gateway.host} others could reach the gateway, and without keys whoever "
            "reaches it may replace the weights; make keys (policy.backend, docs/policy.md), leave "
            "it on 127.0.0.1, or say --insecure (gateway.insecure)"
        )
    return family, address


def check_ports(
    config: Config, http_option: str = "gateway.port", grpc_option: str = "gateway.grpc_port"
) -> None:
    """Check that a gateway with these settings could listen now, before a model is loaded.

    Args:
        config: The settings.
        http_option: The option for the port of HTTP, for errors.
        grpc_option: The option for the port of gRPC.

    Raises:
        ConfigError: As `place_of`, and for a port that is taken.
    """
    import uvicorn  # noqa: F401  a missing extra is reported here, not by a child process

    place = place_of(config)
    gateway = config.gateway
    for port, option in ((gateway.port, http_option), (gateway.grpc_port, grpc_option)):
        if port:
            _bound(config, place, port, option).close()


def free_port(config: Config) -> int:
    """Return a port that is free now, at the address of a gateway with these settings."""
    with _bound(config, place_of(config), 0, "gateway.port") as listener:
        return int(listener.getsockname()[1])


def _bound(
    config: Config,
    place: tuple[socket.AddressFamily, str],
    port: int,
    option: str,
    backlog: int | None = None,
) -> socket.socket:
    family, address = place
    try:
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        raise _can_not_listen(config, port, error, option) from None


def _can_not_listen(config: Config, port: int, error: OSError, option: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} is taken; choose another with {option}")
    # Python appends the address to the system's message.
    why = os.strerror(error.errno or 0) if error.errno in errno.errorcode else error.strerror
    return ConfigError(
        f"the gateway can't listen on {config.gateway.host} port {port}: {why}; choose another "
        f"{option} or gateway.host"
    )


def _is_own(address: str) -> bool:
    """Return whether only programs of this machine reach an address."""
    found = ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
