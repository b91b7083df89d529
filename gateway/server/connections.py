"""HTTP connections: turns between clients, limits on slow clients."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, Protocol, cast

from starlette.types import Scope

from ...config import GatewayConfig, NanoInferenceError, RequestError
from ...config.logger import get_logger
from ...telemetry import instruments, now_ns
from ..call import TENANT_HEADER
from .fair_queue import FairQueue
from .framing import StrictProtocol
from .http import ARRIVED, UNREAD, call_of
from .limits import Overloaded, RequestLimits
from .measures import Measures, Reason

ROUND_S = 0.002
"""Length of a round, without its last piece of work. Other work of the event loop runs between
rounds, so that many clients at once delay it by a few milliseconds at a time."""

MOST_IN_A_ROUND = 4
"""Pieces of work; each begins more work after the round."""

CROWD = 256
"""Waiting pieces of work of a single client. Beyond that, the event loop pauses for newcomers, and
the stages get the processors."""

CROWD_PAUSE_S = 0.005
"""Pause between two rounds of a crowd, whose requests would wait in the pipeline anyway."""

Work = Callable[[], None]


class Rounds:
    """Pieces of work of many connections, a few at a time; clients take turns."""

    def __init__(self) -> None:
        self._queue = FairQueue[bytes, tuple[bytes, Work]]()
        self._due: asyncio.Handle | None = None

    def put(self, client: bytes, work: Work) -> None:
        """Queue a piece of work; called on the event loop.

        Args:
            client: The client whose turn it takes.
            work: Takes about a millisecond at most, and raises nothing.
        """
        self._queue.put(client, (client, work))
        self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queue:
            return
        if self._queue.only > CROWD:
            self._due = self._due or loop.call_later(CROWD_PAUSE_S, self._round, loop)
            return
        if isinstance(self._due, asyncio.TimerHandle):  # another client has come
            self._due.cancel()
            self._due = None
        self._due = self._due or loop.call_soon(self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = None
        end_s = loop.time() + ROUND_S
        try:
            for done in range(MOST_IN_A_ROUND):
                found = None if done and loop.time() >= end_s else self._queue.next()
                if found is None:
                    break
                self._queue.remove(found[0], found)
                found[1]()
        finally:
            self._go_on(loop)


LINGER_S = 2.0
"""Time for a client to read an error while the rest of its request is discarded: closing a
connection with unread bytes resets it, and the response may be lost."""

SEND_BUFFER_BYTES = 1 << 18
"""The kernel's buffer for a client that does not read; it takes twice that."""

# Cap on the elapsed time per sweep, so that no client times out for a stalled event loop.
_MOST_TICK_S = 1.0
# In place of `body_timeout_s` while requests are refused for lack of room.
_PRESSED_S = 1.0
_LOG_EVERY_S = 1.0
# Bytes read of one connection per turn. With asyncio's 256 KiB of each of many large bodies, a
# small request would wait for seconds.
_READ_BYTES = 1 << 16
# Bytes that are sent without waiting for more of their turn.
_GATHERED_BYTES = 1 << 14

Phase = Literal["head", "come", "body", "working", "sending", "rest", "idle", "leaving"]
"""The phase of a connection:

- head: the first bytes of a request are awaited, or its head is incomplete
- idle: as head, after an earlier request and without any byte of the next one
- come: bytes of a head wait for their round
- body: the body is arriving
- working: the request is being answered
- sending: the response is complete, and the client hasn't taken all of it
- rest: the response is complete, and the rest of the body is arriving
- leaving: the connection was ended
"""

# Bytes of a head in which its tenant is searched; otherwise the client is its address.
_HEAD_BYTES = 8192
_TENANT = f"\r\n{TENANT_HEADER}:".lower().encode()


class Watched(Protocol):
    """A connection as `Connections` sees it."""

    phase: Phase

    def end(self, error: NanoInferenceError | None = None) -> None: ...

    def check(self, window_s: float) -> Reason | None: ...


class GatheringTransport:
    """A transport that sends together what is written in one turn of the event loop.

    uvicorn writes the head of a response, each part and the end by themselves, and a system call
    takes longer than what is written by it (0.1 ms on two shared cores).
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.inner = transport
        self._written = b""
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        if not self._written and data:
            self._loop.call_soon(self.flush)
        self._written += data
        # The transport pauses its writer only for what it has.
        if len(self._written) > _GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send now."""
        written, self._written = self._written, b""
        if written:
            self.inner.write(written)

    def close(self) -> None:
        self.flush()
        self.inner.close()

    def write_eof(self) -> None:
        self.flush()
        self.inner.write_eof()


class Connection(StrictProtocol):
    """uvicorn's connection, with a phase, and an end with an error as the response.

    Attributes:
        phase: What it waits for.
        on_handshake: Called once the TLS handshake is complete; None without TLS.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.phase: Phase = "head"
        self.on_handshake: Callable[[], None] | None = None
        self._all = connections
        self._left = False
        self._lost = False
        # The client whose turns it takes; bytes that wait for their round.
        self._client = b""
        self._come: bytes | None = None
        self._come_ns = 0
        self._received_bytes = 0
        # When the phase, or the body's current window, began; bytes received until then.
        self._since_s = connections.now_s
        self._window_bytes = 0
        # Bytes that the client hasn't taken, and since when it has taken none.
        self._unsent_bytes = 0
        self._unsent_since_s = connections.now_s
        # How long, and since when, writing has been paused, since the client does not read.
        self._paused_ns = self._paused_since_ns = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_since_ns = now_ns()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_ns, self._paused_since_ns = self._unread_ns(), 0

    def _unread_ns(self) -> int:
        """Return for how long writing has been paused."""
        since_ns = self._paused_since_ns
        return self._paused_ns + (now_ns() - since_ns if since_ns else 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathering = GatheringTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._gathering))
        # asyncio's transports only.
        with suppress(AttributeError):
            transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        if self.client is not None:
            self._client = self.client[0].encode()
        if self.on_handshake is not None:
            self.on_handshake()
        else:
            set_socket(transport)
        self._all.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._all.leave(self)
        # Ending a request in flight takes as long as beginning one.
        self._all.rounds.put(self._client, partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if self._left:
            return
        self._received_bytes += len(data)
        if self.phase in ("head", "idle", "come"):
            self._wait_for_round(data)
        else:
            super().data_received(data)
            self.update()

    def _wait_for_round(self, data: bytes) -> None:
        """Handle the bytes in a round, with those that arrive until then."""
        if self._come is None:
            self._come, self._come_ns = data, now_ns()
            self._client = self._all.client_of(data[:_HEAD_BYTES]) or self._client
            self._all.rounds.put(self._client, self._take_round)
            self.update()
        else:
            self._come += data
        # Not earlier, since most requests arrive whole.
        if len(self._come) >= _READ_BYTES:
            self.transport.pause_reading()

    def _take_round(self) -> None:
        data, self._come = self._come, None
        if self._left or self._lost or self.transport.is_closing() or data is None:
            return
        self.transport.resume_reading()
        self.app_state = {ARRIVED: self._come_ns, UNREAD: self._unread_ns}
        super().data_received(data)
        self.update()

    def _should_upgrade(self) -> bool:
        # A handshake is a GET (RFC 6455); elsewhere the header is an offer that is not taken.
        return self.scope["method"] == "GET" and super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on; from here on it is no connection of HTTP."""
        self._left = True
        self._all.leave(self)
        self.transport = self._gathering.inner
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        self._gathering.flush()
        super().on_response_complete()
        # `Connections` enforces it; uvicorn would not set its own again after the rest of a body.
        self._unset_keepalive_if_required()
        self.update()

    def refuse(self, why: str) -> None:
        self._all.count("malformed")
        self.end(RequestError(f"{why.rstrip('.')}; send HTTP/1.1", code="malformed"))

    def shutdown(self) -> None:
        if self._left:
            self.transport.abort()
        # Closing asyncio's TLS transport twice breaks it.
        elif not self.transport.is_closing():
            super().shutdown()

    def update(self) -> None:
        """Update the phase."""
        if self not in self._all:
            return  # a WebSocket now
        phase = self._find_phase()
        if phase != self.phase:
            # The pieces of a head share one time limit.
            if {phase, self.phase} != {"head", "come"}:
                self._begin_window()
            self.phase = phase
            self._all.moved(self)

    def end(self, error: NanoInferenceError | None = None) -> None:
        """Close the connection, with an error as the response unless another one has begun."""
        self.forget_waiting()
        cycle, answered = self.running, False
        scope: Scope = {}
        if cycle is not None and not cycle.response_complete:
            answered = cycle.response_started
            scope = {**cycle.scope}
            cycle.disconnected = True
            cycle.message_event.set()
        if error is None or answered or self.transport.is_closing():
            self.transport.abort()
            return
        response = self._all.respond(call_of(scope), error)
        head = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
        fields = [b"%s: %s" % field for field in response.raw_headers]
        lines = [head, *fields, b"connection: close", b"", bytes(response.body)]
        self.transport.write(b"\r\n".join(lines))
        self._left = True
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
        self.update()

    def check(self, window_s: float) -> Reason | None:
        """End the connection of a slow client; return the reason.

        Args:
            window_s: The time in which enough of a body must arrive.
        """
        self.update()
        config, now_s = self._all.config, self._all.now_s
        waited_s = now_s - self._since_s
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, now_s
        elif now_s - self._unsent_since_s >= config.send_timeout_s:
            self.end()
            return "slow_reader"
        match self.phase:
            case "idle" if waited_s >= config.keep_alive_s:
                # A normal end; the client isn't slow.
                self.timeout_keep_alive_handler()
            case "head" if waited_s >= config.head_timeout_s:
                late = f"no request came within {config.head_timeout_s:g} s; send it at once"
                self.end(_timeout(late) if self._received_bytes else None)
                return "slow_head"
            case "body" | "rest" if self.flow.read_paused:
                self._begin_window()
            case "body" | "rest" if waited_s >= window_s:
                least_bytes = config.min_body_bytes_per_s * waited_s
                if self._received_bytes - self._window_bytes < least_bytes:
                    self.end(_timeout("the body came too slowly; send it at once"))
                    return "slow_body"
                self._begin_window()
            case "leaving" if waited_s >= LINGER_S:
                self.end()
        return None

    def _begin_window(self) -> None:
        self._since_s, self._window_bytes = self._all.now_s, self._received_bytes

    def _find_phase(self) -> Phase:
        if self._left:
            return "leaving"
        if self._come is not None:
            return "come"
        if self.is_answering:
            return "body" if self.awaits_body else "working"
        if self.transport.get_write_buffer_size():
            return "sending"
        if self.reading == "body":
            return "rest"
        return "head" if self.running is None or self.reading else "idle"


class Connections:
    """The connections of a server. Beyond the limit a new one replaces another.

    Replaced is the one that has waited longest without a request in flight, idle or slow with its
    head, so that such connections can't shut others out; else one whose complete response the
    client hasn't taken.

    Attributes:
        now_s: A clock that stops while the event loop is stalled, so that no client times out for
            that. `sweep` advances it.
        rounds: The rounds in which requests begin and end.
        client_of: Returns the client of the first bytes of a head, unverified, for turns only; b""
            if unknown.
        respond: As `RequestLimits.respond`.
    """

    def __init__(
        self, config: GatewayConfig, limits: RequestLimits, most: int, measures: Measures
    ) -> None:
        """`most`: the most open connections."""
        self.now_s = 0.0
        self.rounds = Rounds()
        self.client_of = named_client
        self.config = config
        self.respond = limits.respond
        self._limits = limits
        self._measures = measures
        self._most = most
        self._all: dict[Watched, None] = {}
        # Each in order of entering the phase.
        self._waiting: dict[Watched, None] = {}
        self._sending: dict[Watched, None] = {}
        self._counts: Counter[Reason] = Counter()
        self._logged_s = -_LOG_EVERY_S
        measures.watch(instruments.GATEWAY_CONNECTIONS, self.__len__)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, connection: Watched) -> bool:
        return connection in self._all

    def enter(self, connection: Watched) -> None:
        """Add a new connection."""
        full = len(self._all) >= self._most
        self._all[connection] = None
        oldest = next(iter(self._waiting or self._sending), None) if full else None
        self.moved(connection)
        if oldest is not None:
            self.count("replaced")
            self._forget(oldest)
            oldest.end()
        elif full:
            self.count("all_busy")
            connection.end(Overloaded("all connections have requests under way; try again"))

    def moved(self, connection: Watched) -> None:
        """Sort a connection by its new phase."""
        self._forget(connection)
        if connection.phase == "sending":
            self._sending[connection] = None
        elif connection.phase not in ("come", "body", "working"):
            self._waiting[connection] = None

    def leave(self, connection: Watched) -> None:
        """Remove a closed connection."""
        self._all.pop(connection, None)
        self._forget(connection)

    def end_all(self, error: NanoInferenceError | None = None) -> None:
        """End every connection, as `Connection.end`."""
        for connection in list(self._all):
            connection.end(error)

    def count(self, reason: Reason, number: int = 1) -> None:
        """Count refused clients; logged about once a second, in one line."""
        self._counts[reason] += number
        self._measures.refused(reason, number)

    def sweep(self, elapsed_s: float) -> None:
        """End connections of slow clients; called about once a second."""
        self.now_s += min(elapsed_s, _MOST_TICK_S)
        refused, self._limits.refused = self._limits.refused, Counter()
        for reason, number in refused.items():
            self.count(reason, number)
        window_s = self.config.body_timeout_s
        if refused:
            window_s = min(window_s, _PRESSED_S)
        for connection in list(self._all):
            if slow := connection.check(window_s):
                self.count(slow)
        if self._counts and self.now_s - self._logged_s >= _LOG_EVERY_S:
            log = get_logger()
            counts = {str(reason): number for reason, number in self._counts.items()}
            log.warning("connections_not_served", **counts, connections=len(self))
            self._counts.clear()
            self._logged_s = self.now_s
        self._measures.update_gauges()

    def _forget(self, connection: Watched) -> None:
        self._waiting.pop(connection, None)
        self._sending.pop(connection, None)


def set_socket(transport: asyncio.BaseTransport) -> None:
    """Turn off Nagle's algorithm, and bound the kernel's send buffer.

    asyncio sets TCP_NODELAY only if the listening socket has its protocol's number. Without it, a
    small body, or the next token, is 40 ms late. The kernel's default buffer takes megabytes for a
    client that reads nothing, so that `send_timeout_s` would never apply. Options of the listening
    socket would miss clients that connect before they are set.
    """
    accepted = transport.get_extra_info("socket")
    if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # the client has disconnected
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def named_client(head: bytes) -> bytes:
    """Return the tenant in a head; b"" if there is none."""
    _, found, rest = head.lower().partition(_TENANT)
    return rest.partition(b"\r\n")[0].strip() if found else b""


def _timeout(message: str) -> RequestError:
    return RequestError(message, code="request_timeout")
