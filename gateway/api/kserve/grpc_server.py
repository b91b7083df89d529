"""The gRPC server. Whoever imports this imports gRPC, which takes a while and starts threads."""

from __future__ import annotations

from typing import Any

import anyio
import grpc

from ....config import ConfigError, GatewayConfig
from ...policy.chain import PolicyChain
from ...server.connections import LINGER_S
from ...server.http import DEFAULT_RETRY_S, EngineError
from ...server.limits import ConnectionLimits
from ...server.server import HttpServer
from ...server.tls import Certificates
from ...serving.lane_state import Readiness
from .grpc_calls import GrpcCalls
from .grpc_methods import GrpcMethods
from .shared import KServe

_MAX_INT32 = 2**31 - 1
_MAX_METADATA_BYTES = 1 << 16
# Clients may ask so often whether the connection is alive, calls under way or not.
_LEAST_PING_MS = 10_000


class GrpcServer:
    """Serves KServe V2 over gRPC.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        kserve: KServe,
        policy: PolicyChain,
        readiness: Readiness,
        config: GatewayConfig,
        http: HttpServer,
    ) -> None:
        """Args: what it serves, what each call has to pass, whether it takes requests, the
        gateway's settings, and the server beside it, with which it shares who observes calls, how
        many there may be, and the certificates."""
        self.port = 0
        self._config = config
        self._certificates = http.certificates
        self._calls = GrpcCalls(GrpcMethods(kserve, readiness), policy, config, http)
        self._server = grpc.aio.server(options=_options(config, http.most))
        self._server.add_generic_rpc_handlers((self._calls.handler,))

    def listen(self, address: str) -> None:
        """Takes the port; what comes there waits for `start`.

        Args:
            address: Of this machine, an IP address.

        Raises:
            ConfigError: The port can't be had.
        """
        host = f"[{address}]" if ":" in address else address
        try:
            self.port = self._listen(f"{host}:{self._config.grpc_port}")
        except RuntimeError:
            raise ConfigError(
                f"the gateway can't listen on {self._config.host} port {self._config.grpc_port}, "
                "for gRPC: it is taken, or not allowed; choose another gateway.grpc_port or "
                "gateway.host"
            ) from None

    async def start(self) -> None:
        """Serves from then on."""
        await self._server.start()

    def drain(self) -> None:
        """Ends streams when what was asked for on them is answered; others may be begun at another
        gateway. Calls that have begun go on."""
        self._calls.waiting.streams.close(_stopping())

    async def aclose(self, leave_s: float) -> None:
        """Takes nothing new. Calls under way have so many seconds, and are then told to go."""
        self.drain()
        stopped = anyio.Event()

        async def end_late() -> None:
            with anyio.move_on_after(leave_s):
                await stopped.wait()
            self._calls.endings.close(_stopping())

        async with anyio.create_task_group() as group:
            group.start_soon(end_late)
            await self._server.stop(leave_s + LINGER_S)
            stopped.set()

    def _listen(self, place: str) -> int:
        if self._certificates is None:
            port: int = self._server.add_insecure_port(place)
            return port
        port = self._server.add_secure_port(place, _credentials(self._certificates))
        return port


def _stopping() -> EngineError:
    return EngineError(
        "the gateway is stopping; send it again, to another one",
        code="shutting_down",
        retry_after_s=DEFAULT_RETRY_S,
    )


def _options(config: GatewayConfig, most: ConnectionLimits) -> list[tuple[str, Any]]:
    """gRPC's, by their names in grpc/impl/channel_arg_names.h."""
    return [
        # Another server that has the port is told of, rather than sharing it.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", min(config.max_body_bytes, _MAX_INT32)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", most.connections),
        # Of one connection. Clients keep back what is beyond that, and would not be told.
        ("grpc.max_concurrent_streams", most.requests + most.connections),
        ("grpc.server_handshake_timeout_ms", _ms(config.head_timeout_s)),
        ("grpc.max_connection_idle_ms", _ms(config.keep_alive_s)),
        # Whoever does not answer to that has gone.
        ("grpc.keepalive_time_ms", _ms(config.send_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_MS),
    ]


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _credentials(certificates: Certificates) -> Any:
    """Of handshakes, each of which has the certificate that is in place by then."""
    given = certificates.pem

    def changed() -> Any:
        nonlocal given
        # On a thread of gRPC's. It is `Certificates` that looks at the files.
        if certificates.pem is given:
            return None
        given = certificates.pem
        return _configuration(certificates)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(certificates),
        changed,
        require_client_authentication=bool(certificates.pem.client_ca),
    )


def _configuration(certificates: Certificates) -> Any:
    key, chain, client_ca = certificates.pem
    return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca or None)
