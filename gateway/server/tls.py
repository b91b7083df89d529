"""TLS, with certificates that may change while the gateway runs."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from ...config import ConfigError, GatewayConfig
from ...config.logger import get_logger
from .connections import Connection, Connections, Phase, set_socket
from .measures import Reason

SHUTDOWN_S = 2.0
"""Time for a client's close_notify."""

# Bytes decrypted of one connection per turn. asyncio's 256 KiB are also a buffer per connection.
_READ_BYTES = 1 << 15
# `Connections` enforces it.
_NEVER_S = 10**9


class Pem(NamedTuple):
    """The files' content, in PEM; `client_ca` is empty without one."""

    key: bytes
    chain: bytes
    client_ca: bytes


# A file's modification time, size and inode.
_Stamp = tuple[int, int, int]


class Certificates:
    """The gateway's certificate with its key, and the CA of client certificates.

    Attributes:
        context: For new handshakes; replaced when the files change.
        pem: The same, for gRPC.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError when the files can't be read, or don't belong together."""
        self._config = config
        self._files = [
            Path(name)
            for name in (config.tls_certificate, config.tls_key, config.tls_client_ca)
            if name
        ]
        self._stamps = [_stamp(file) for file in self._files]
        try:
            self.context, self.pem = self._load()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"gateway.tls_certificate, gateway.tls_key and gateway.tls_client_ca: {_why(error)}"
            ) from None

    def refresh(self) -> None:
        """Load changed files, for new connections.

        Certificate and key may be written one after the other: invalid files are logged once, and
        the previous ones stay in use until the files change again.
        """
        stamps = [_stamp(file) for file in self._files]
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.context, self.pem = self._load()
        except (OSError, ValueError) as error:
            get_logger().warning("tls_certificate_refused", error=_why(error))

    def _load(self) -> tuple[ssl.SSLContext, Pem]:
        """Raises: OSError, of which ssl's errors are kinds; ValueError."""
        config = self._config
        # Read before `load_cert_chain`: later writes are seen by the next refresh.
        client_ca = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else b""
        chain = Path(config.tls_certificate).read_bytes()
        pem = Pem(Path(config.tls_key).read_bytes(), chain, client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        # For a key with a passphrase, OpenSSL would otherwise prompt on the terminal.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: b"")
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        first = x509.load_pem_x509_certificates(chain)[0]
        get_logger().info("tls_certificate_loaded", expires=first.not_valid_after_utc.isoformat())
        return context, pem


class Handshake(SSLProtocol):
    """A TLS handshake, and then the decryption for its connection.

    Until the handshake is complete, it is one of the `Connections` itself, counted and replaced
    like any that wait.
    """

    max_size = _READ_BYTES

    phase: Phase = "head"

    def __init__(
        self, connections: Connections, connection: Connection, certificates: Certificates
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            certificates.context,
            None,  # type: ignore[arg-type]  # no waiter
            server_side=True,
            ssl_handshake_timeout=_NEVER_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        self._all = connections
        self._since_s = connections.now_s
        self._socket: asyncio.BaseTransport
        self._in_progress = False
        connection.on_handshake = self.complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket, self._in_progress = transport, True
        set_socket(transport)
        self._all.enter(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._in_progress:
            self.complete()
            self._all.count("handshake_failed")
        super().connection_lost(exc)

    def complete(self) -> None:
        """End the handshake; its connection takes its place among the `Connections`."""
        self._in_progress = False
        self._all.leave(self)

    def end(self, error: Exception | None = None) -> None:
        """Close the connection, without a response."""
        # The caller has counted the reason.
        self.complete()
        self._socket.abort()  # type: ignore[attr-defined]

    def check(self, window_s: float) -> Reason | None:
        """As `Connection.check`."""
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
    """Return the reason, without any content of the files."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "not certificates and keys in PEM, or a key with a passphrase"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return "no certificate in PEM"
