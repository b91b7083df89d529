"""TLS in front of the gateway's connections, with certificates that may change while it runs."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from ...config import ConfigError, GatewayConfig
from ...config.logger import get_logger
from ..serving.measures import Reason
from .connections import Connection, Connections, set_socket

SHUTDOWN_S = 2.0
"""For a client to say that it has read all, which ends TLS in good order."""

# Of each connection so much is decrypted before the others have their turn. asyncio's 256 KiB are
# also what it keeps for each of them.
_READ_BYTES = 1 << 15
# `Connections` sees to it.
_NEVER_S = 10**9


class Pem(NamedTuple):
    """What the files hold, each in PEM; `client_ca` is empty without one."""

    key: bytes
    chain: bytes
    client_ca: bytes


# Of a file: when it was written, its length, and which file it is.
_Stamp = tuple[int, int, int]


class Certificates:
    """The gateway's certificate with its key, and those by which it knows its clients.

    Attributes:
        context: For handshakes that begin now; another one when the files have changed.
        pem: The same, for those who make something else of it.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Args: the settings, in which `tls_certificate` is set.

        Raises:
            ConfigError: The files can't be read, or don't belong together.
        """
        self._config = config
        self._files = [
            Path(name)
            for name in (config.tls_certificate, config.tls_key, config.tls_client_ca)
            if name
        ]
        self._stamps = self._look()
        try:
            self.context, self.pem = self._load()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"gateway.tls_certificate, gateway.tls_key and gateway.tls_client_ca: {_why(error)}"
            ) from None

    def refresh(self) -> None:
        """Takes what has changed, for connections that are made from now on.

        Certificate and key may be written one after the other, and anything may go wrong with
        them: what can't be used is told once, and those before it stay until the files change
        again.
        """
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.context, self.pem = self._load()
        except (OSError, ValueError) as error:
            get_logger().warning("tls_certificate_refused", error=_why(error))

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(file) for file in self._files]

    def _load(self) -> tuple[ssl.SSLContext, Pem]:
        """Raises: OSError, of which ssl's errors are kinds; ValueError."""
        config = self._config
        # Before they are found to belong together: what is written from now on is looked at next.
        client_ca = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else b""
        chain = Path(config.tls_certificate).read_bytes()
        pem = Pem(Path(config.tls_key).read_bytes(), chain, client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        # Of a key that has a passphrase OpenSSL would ask whoever sits at the terminal.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: b"")
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        first = x509.load_pem_x509_certificates(chain)[0]
        get_logger().info("tls_certificate_loaded", expires=first.not_valid_after_utc.isoformat())
        return context, pem


class Handshake(SSLProtocol):
    """A connection that does not speak HTTP yet, and then what decrypts for one that does.

    Until then it stands among the connections itself: those who only begin are counted, and make
    room, like any that wait.

    Attributes:
        phase: As of a connection whose request is awaited.
    """

    max_size = _READ_BYTES

    phase = "head"

    def __init__(
        self, connections: Connections, connection: Connection, certificates: Certificates
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            certificates.context,
            None,  # type: ignore[arg-type]  # nobody waits for it
            server_side=True,
            ssl_handshake_timeout=_NEVER_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        self._all = connections
        self._since_s = connections.now_s
        self._socket: asyncio.BaseTransport
        self._under_way = False
        connection.handshake = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket, self._under_way = transport, True
        set_socket(transport)
        self._all.enter(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._under_way:
            self.complete()
            self._all.count("handshake_failed")
        super().connection_lost(exc)

    def complete(self) -> None:
        """It is none any more: the connection itself stands among the others."""
        self._under_way = False
        self._all.leave(self)

    def end(self, error: Exception | None = None) -> None:
        """Closes it; no answer could be read."""
        # It was counted as what ended it.
        self.complete()
        self._socket.abort()  # type: ignore[attr-defined]

    def check(self, window_s: float) -> Reason | None:
        """As that of a connection."""
        if self._all.now_s - self._since_s < self._all.config.head_timeout_s:
            return None
        self.end()
        return "slow_head"


def _stamp(file: Path) -> _Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: OSError | ValueError) -> str:
    """Without anything of the files themselves."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "not certificates and keys in PEM, or a key with a passphrase"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return "no certificate in PEM"
