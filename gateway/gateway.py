"""The gateway on a client of the bus, behind ports of this process."""

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

from ..config import BusError, Config, ConfigError, GatewayConfig
from ..config.logger import get_logger
from ..pipeline.client import BusClient

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from .api.kserve.grpc_server import GrpcServer
    from .api.kserve.service import KServe
    from .deployment.models import Models
    from .policy.chain import PolicyChain
    from .policy.policy import Policy
    from .server.server import HttpServer
    from .serving.durable_calls import KeptCalls
    from .serving.measures import Measures
    from .serving.readiness import Readiness

DEFAULT_PORT = 30000
"""SGLang's."""

_WARN_S = 3600.0
"""So often it says that it is open to everybody."""


class Gateway:
    """Serves HTTP, and gRPC where it has a port, while the context is open.

    Its spans and metrics go where those of the client do.

    ```python
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        print(gateway.url)
    ```

    Attributes:
        port: Where it listens; with `gateway.port` 0 a free one.
        grpc_port: The same of gRPC and `gateway.grpc_port`; None where that is None.
        kserve: The models and the shared memory of KServe V2, from when it listens.
    """

    def __init__(self, client: BusClient, config: Config) -> None:
        self.port = config.gateway.port
        self.grpc_port = config.gateway.grpc_port
        self._client = client
        self._config = config
        self._readiness: Readiness
        self._server: HttpServer
        self.kserve: KServe
        self._grpc: GrpcServer | None = None
        self._task: asyncio.Task[None]
        self._kept: KeptCalls | Models
        self._policy: Policy
        self._beside: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        scheme = "https" if self._config.gateway.tls_certificate else "http"
        return f"{scheme}://{self._host}:{self.port}"

    @property
    def places(self) -> dict[str, str]:
        """Where it listens: its "url", and where clients of "grpc" find it."""
        grpc = {} if self.grpc_port is None else {"grpc": f"{self._host}:{self.grpc_port}"}
        return {"url": self.url} | grpc

    @property
    def _host(self) -> str:
        host = self._config.gateway.host
        return f"[{host}]" if ":" in host else host

    async def __aenter__(self) -> Gateway:
        """Listens from then on.

        Raises:
            ConfigError: A port can't be had, others could reach it without keys, the certificate
                can't be used, or the policy's settings can't be obeyed.
            NanoInferenceError: The policy can't be read.
        """
        # Whoever only names this class need not wait for them.
        from .server.server import BACKLOG, HttpServer
        from .serving.measures import Measures

        listener = self._listen(BACKLOG)
        self.port = listener.getsockname()[1]
        own = msgspec.structs.replace(self._config.gateway, port=self.port)
        config = msgspec.structs.replace(self._config, gateway=own)
        measures = Measures(self._client.tracing, self._client.metrics)
        try:
            app = await self._application(config, measures)
            self._readiness = app.state.readiness
            self._policy, self.kserve = app.state.policy, app.state.kserve
            chain: PolicyChain = app.state.chain
            self._server = HttpServer(app, config.gateway, measures, self._policy.audit)
            if config.policy.knows_callers:
                self._server.connections.client_of = self._policy.client_of
            if self.grpc_port is not None:
                self._grpc = self._grpc_server(config.gateway, chain)
                self._grpc.listen(listener.getsockname()[0])
                self.grpc_port = self._grpc.port
            await self._policy.open()
            if self._grpc is not None:
                await self._grpc.start()
        except BaseException:
            listener.close()
            if self._grpc is not None:
                await self._grpc.aclose(0)
            raise
        self._task = asyncio.create_task(self._server.serve([listener]), name="gateway")
        self._kept = app.state.kept_calls
        beside = {
            **{name: work() for name, work in app.state.beside.items()},
            "warnings": self._warn_forever(listener.getsockname()[0]),
        }
        self._beside = [asyncio.create_task(work, name=name) for name, work in beside.items()]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops listening; calls under way have a few seconds. `drain` before gives them more.

        Those that have not ended by then go on at other gateways, if their clients do.
        """
        from .server.server import LEAVE_S

        self._kept.stop()
        self._server.should_exit = True
        beside = [] if self._grpc is None else [self._grpc.aclose(LEAVE_S)]
        try:
            await asyncio.gather(asyncio.shield(self._task), *beside)
        finally:
            for task in self._beside:
                task.cancel()
            await asyncio.wait(self._beside)
            await self._kept.aclose()
            await self._policy.aclose()
            self.kserve.regions.close()

    async def drain(self, timeout_s: float) -> bool:
        """Is not ready from now on, refuses new requests, and waits for the calls under way.

        It goes on to listen, so that those who ask are told.

        Args:
            timeout_s: How long to wait.

        Returns:
            Whether all of them have ended.
        """
        self._readiness.draining = True
        if self._grpc is not None:
            self._grpc.drain()
        with anyio.move_on_after(timeout_s):
            await self._server.calls.idle()
            return True
        return False

    async def failed(self) -> None:
        """Waits until the server has stopped, which it does by itself only when it fails."""
        await asyncio.shield(self._task)

    async def _application(self, config: Config, measures: Measures) -> Starlette:
        """That of the model, or of all models where the deployment has several."""
        from .app import make_app
        from .deployment.app import make_deployment_app

        if await self._has_models():
            return make_deployment_app(self._client, config, measures)
        return make_app(self._client, config, measures)

    async def _has_models(self) -> bool:
        bus = self._client.bus
        if self._config.models or bus.model:
            return not bus.model
        try:
            return bool(await bus.store.models.read())
        except BusError:
            # It is as the settings say; who has written down models gives them to all.
            return False

    def _grpc_server(self, config: GatewayConfig, chain: PolicyChain) -> GrpcServer:
        """Whoever has no port for it need not wait until gRPC is imported."""
        # Its own log has a line for whatever anybody sends, and no form but that of its own.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from .api.kserve.grpc_server import GrpcServer

        return GrpcServer(self.kserve, chain, self._readiness, config, self._server)

    def _listen(self, backlog: int) -> socket.socket:
        place = place_of(self._config)
        return _bound(self._config, place, self.port, "gateway.port", backlog)

    async def _warn_forever(self, address: str) -> None:
        """Says what is dangerous about how it was set up."""
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


def place_of(config: Config) -> tuple[socket.AddressFamily, str]:
    """The address on which a gateway with these settings listens.

    Raises:
        ConfigError: There is none of that name, or others could come there without keys.
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
        http_option: The name by which the user chose the port for HTTP.
        grpc_option: The same of gRPC.

    Raises:
        ConfigError: As `place_of`; also for a port that is taken.
    """
    import uvicorn  # noqa: F401  a missing extra is reported here, not by a child process

    place = place_of(config)
    gateway = config.gateway
    for port, option in ((gateway.port, http_option), (gateway.grpc_port, grpc_option)):
        if port:
            _bound(config, place, port, option).close()


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
    # Of a socket that can't be bound, Python adds the address to the system's words.
    why = os.strerror(error.errno or 0) if error.errno in errno.errorcode else error.strerror
    return ConfigError(
        f"the gateway can't listen on {config.gateway.host} port {port}: {why}; choose another "
        f"{option} or gateway.host"
    )


def _is_own(address: str) -> bool:
    """Whether only this machine's programs reach an address."""
    found = ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
