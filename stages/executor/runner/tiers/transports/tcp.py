"""Blocks over TCP, for executors on two hosts. Both sides prove that they hold a shared secret.

    server -> client    its nonce
    client -> server    its nonce, HMAC("client", both nonces, incarnation)
    server -> client    HMAC("server", both nonces, incarnation); else it closes the connection
    client -> server    number of blocks, then (name, slot) of each
    server -> client    for each block: its length and checksum, then its bytes; length 0: not there

In place of a number of blocks, `_ASK_STEP` requests the last step whose blocks are offered.

Numbers are little-endian. Nothing is encrypted: the network between executors must be private.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from ......config import ModelError
from .slots import ANOTHER_SIZE, STEP, SharedSlots, SlotAddress, WantedBlock

TIMEOUT_S = 5.0
"""Longest time for the handshake, and for the blocks of one `read`."""

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A silent reader is probed after 30 seconds, and dropped after a minute without an answer."""

MOST_BLOCKS = 4096
"""Blocks of one request. A reader gets more in several requests."""

MOST_CONNECTIONS = 256

_NONCE = 32
_COUNT = struct.Struct("<I")
_ASK_STEP = 0xFFFFFFFE
_REQUEST = struct.Struct("<16sQ")
_ANSWER = struct.Struct("<QQ")


class BlockServer:
    """Sends the offered slots of this executor to others.

    Attributes:
        address: host:port.
    """

    def __init__(self, slots: SharedSlots, listen: str, secret: str) -> None:
        """Listen.

        Args:
            slots: The slots.
            listen: host:port, IPv6 in brackets; port 0 for any.
            secret: Shared secret of both sides.

        Raises:
            ModelError: There is no secret, or the address can't be listened on.
        """
        if not secret:
            raise ModelError(
                "engine.kv_listen is set without engine.kv_secret; give the executors of all hosts "
                "the same secret"
            )
        host, port = split_address(listen)
        if host in ("0.0.0.0", "::"):
            raise ModelError(
                f"engine.kv_listen is {listen!r}, which other hosts can't connect to; give an "
                "address of this host that they reach"
            )
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server_class = type("_Server", (_Server,), {"address_family": family})
            self._server: _Server = server_class((host, port), _Connection)
        except OSError as error:
            raise ModelError(
                f"engine.kv_listen is {listen!r}, which can't be listened on: "
                f"{error.strerror or error}; give an address of this host"
            ) from None
        self._server.secret = secret.encode()
        self.add(slots)
        bound = self._server.server_address[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kv-serve", daemon=True
        )
        self._thread.start()

    def add(self, slots: SharedSlots) -> None:
        """Send these slots, too, to readers that prove themselves with their incarnation."""
        self._server.slots[slots.address.incarnation] = slots

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.end_connections()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    secret: bytes

    def __init__(self, *args: Any) -> None:
        self.slots: dict[str, SharedSlots] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._connections) >= MOST_CONNECTIONS:
                return False
            self._connections.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends is no error."""


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        connection = self.request
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (slots := self._proven()) is None:
            return
        # Between two requests any time may pass.
        connection.settimeout(None)
        _keep_alive(connection)
        while True:
            (number,) = _COUNT.unpack(_receive(connection, _COUNT.size))
            if number == _ASK_STEP:
                connection.sendall(STEP.pack(slots.step()))
                continue
            if number > MOST_BLOCKS:
                return
            wanted = _receive(connection, number * _REQUEST.size)
            connection.settimeout(TIMEOUT_S)
            for name, slot in _REQUEST.iter_unpack(wanted):
                self._send(connection, slots, slot, name)
            connection.settimeout(None)

    def _proven(self) -> SharedSlots | None:
        """Return the slots whose incarnation the reader proves itself with; None if it does not."""
        connection, secret = self.request, self.server.secret
        connection.settimeout(TIMEOUT_S)
        until = time.monotonic() + TIMEOUT_S
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        theirs = _receive(connection, _NONCE, until)
        proof = _receive(connection, _NONCE, until)
        for incarnation, slots in [*self.server.slots.items()]:
            if hmac.compare_digest(proof, _proof(secret, "client", ours, theirs, incarnation)):
                connection.sendall(_proof(secret, "server", ours, theirs, incarnation))
                return slots
        return None

    def _send(self, connection: socket.socket, slots: SharedSlots, slot: int, name: bytes) -> None:
        if not slots.offers(slot, name):
            connection.sendall(_ANSWER.pack(0, 0))
            return
        data, checksum = slots.bytes[slot].data, slots.entry(slot)[1]
        sent = connection.sendmsg([_ANSWER.pack(data.nbytes, checksum), data])
        # If the slot is withdrawn meanwhile, the checksum doesn't fit.
        connection.sendall(data[max(0, sent - _ANSWER.size) :])


class TcpSlots:
    """The slots of an executor of another host."""

    def __init__(self, address: SlotAddress, secret: str) -> None:
        """Connect.

        Raises:
            OSError: It can't be reached, or doesn't hold the secret.
        """
        self._lock = threading.Lock()
        self._closed = False
        until = time.monotonic() + TIMEOUT_S
        self._connection = socket.create_connection(split_address(address.tcp), TIMEOUT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._prove(secret.encode(), address.incarnation, until)
        except OSError:
            self._connection.close()
            raise

    def read(self, wanted: Sequence[WantedBlock]) -> list[bool]:
        """Read blocks over TCP; see `BlockSource.read`."""
        whole: list[bool] = []
        with self._lock:
            try:
                for start in range(0, len(wanted), MOST_BLOCKS):
                    whole += self._read(wanted[start : start + MOST_BLOCKS])
            finally:
                if self._closed:
                    self._connection.close()
        return whole

    def step(self) -> int:
        """Return the last step of the other executor; see `BlockSource.step`."""
        with self._lock:
            try:
                until = time.monotonic() + TIMEOUT_S
                self._connection.sendall(_COUNT.pack(_ASK_STEP))
                return int(STEP.unpack(_receive(self._connection, STEP.size, until))[0])
            finally:
                if self._closed:
                    self._connection.close()

    def close(self) -> None:
        """End the connection. A read in flight fails, and frees it."""
        self._closed = True
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(blocking=False):
            self._connection.close()
            self._lock.release()

    def _prove(self, secret: bytes, incarnation: str, until: float) -> None:
        theirs = _receive(self._connection, _NONCE, until)
        ours = secrets.token_bytes(_NONCE)
        self._connection.sendall(ours + _proof(secret, "client", theirs, ours, incarnation))
        proof = _receive(self._connection, _NONCE, until)
        if not hmac.compare_digest(proof, _proof(secret, "server", theirs, ours, incarnation)):
            raise OSError("the other executor doesn't know engine.kv_secret")

    def _read(self, wanted: Sequence[WantedBlock]) -> list[bool]:
        connection, until = self._connection, time.monotonic() + TIMEOUT_S
        names = (_REQUEST.pack(block.name, block.slot) for block in wanted)
        connection.settimeout(TIMEOUT_S)
        connection.sendall(_COUNT.pack(len(wanted)) + b"".join(names))
        answer, whole = bytearray(_ANSWER.size), []
        for block in wanted:
            _receive_into(connection, memoryview(answer), until)
            length, checksum = _ANSWER.unpack(answer)
            if length not in (0, block.into.nbytes):
                raise OSError(ANOTHER_SIZE)
            if length:
                _receive_into(connection, block.into.data, until)
            whole.append(length > 0 and xxhash.xxh3_64_intdigest(block.into.data) == checksum)
        return whole


def _keep_alive(connection: socket.socket) -> None:
    """Let a connection end whose host vanished.

    The system's default is two hours, in which it holds a thread and one of `MOST_CONNECTIONS`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port. Raises ModelError: there is no port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ModelError(
            f"engine.kv_listen is {address!r}; it must be host:port, such as 10.0.0.5:7070"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _proof(secret: bytes, side: str, server: bytes, client: bytes, incarnation: str) -> bytes:
    message = b"nano-kv " + side.encode() + server + client + incarnation.encode()
    return hmac.digest(secret, message, hashlib.sha256)


def _receive(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data), until)
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview, until: float | None) -> None:
    """Fill a buffer. Raises TimeoutError, ConnectionError or another OSError."""
    while view:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("the other executor was too slow")
            connection.settimeout(left)
        if not (number := connection.recv_into(view)):
            raise ConnectionError("the connection has ended")
        view = view[number:]
