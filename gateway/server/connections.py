"""Connections: how many there may be, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...config import GatewayConfig, NanoInferenceError, RequestError
from ...config.logger import get_logger
from ...telemetry import instruments, now_ns
from ..serving.measures import Measures, Reason
from ..serving.origin import TENANT_HEADER
from .calls import ARRIVED
from .limits import Overloaded, RequestLimits

if TYPE_CHECKING:
    from .tls import Handshake


class StrictParser(h11.Connection):
    """h11's of a server, which by itself takes the body's end from Transfer-Encoding where there is
    a Content-Length as well, and requests of any version."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> Any:
        """The next event of the client. Raises h11.RemoteProtocolError for what is refused."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name) for name, _ in event.headers}
            old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (old or b"content-length" in names):
                raise h11.RemoteProtocolError("the body's length is told in two ways")
            if _size(event) > self._max_head_bytes:
                # By itself it looks at heads only that have not come as a whole.
                raise h11.RemoteProtocolError("the head is too large")
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("this is another version of HTTP")
        return event


def _size(request: h11.Request) -> int:
    """Bytes of a head, about."""
    fields = sum(len(name) + len(value) for name, value in request.headers)
    return len(request.method) + len(request.target) + fields


ROUND_S = 0.002
"""How long a round may take, beyond its last piece of work. Between two rounds the event loop does
what else there is, so that many clients at once delay everybody by a few milliseconds each time."""

MOST_IN_A_ROUND = 4
"""What a piece of work begins goes on behind the round, and counts there as well."""

CROWD = 256
"""Pieces of work of one client alone that wait. Beyond them the event loop is left to those who
come next, and the processors to the stages."""

CROWD_PAUSE_S = 0.005
"""Between two rounds of a crowd. What it begins waits in the pipeline anyway."""

Work = Callable[[], None]


class Rounds:
    """Pieces of work, done soon and in order of arrival by client; clients take turns."""

    def __init__(self) -> None:
        # The client whose turn is next comes first.
        self._queues: OrderedDict[bytes, deque[Work]] = OrderedDict()
        self._due: asyncio.Handle | None = None

    def put(self, client: bytes, work: Work) -> None:
        """Has a piece of work done in one of the next rounds; called on the event loop.

        Args:
            client: Whose it is.
            work: Takes no more than a millisecond or so, and raises nothing.
        """
        self._queues.setdefault(client, deque()).append(work)
        self._go_on(asyncio.get_running_loop())

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._queues:
            return
        if self._is_crowd():
            self._due = self._due or loop.call_later(CROWD_PAUSE_S, self._round, loop)
            return
        if isinstance(self._due, asyncio.TimerHandle):  # somebody else has come
            self._due.cancel()
            self._due = None
        self._due = self._due or loop.call_soon(self._round, loop)

    def _is_crowd(self) -> bool:
        return len(self._queues) == 1 and len(next(iter(self._queues.values()))) > CROWD

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = None
        end_s = loop.time() + ROUND_S
        try:
            for done in range(MOST_IN_A_ROUND):
                if not self._queues or (done and loop.time() >= end_s):
                    break
                self._next()()
        finally:
            self._go_on(loop)

    def _next(self) -> Work:
        client, queue = next(iter(self._queues.items()))
        work = queue.popleft()
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        return work


LINGER_S = 2.0
"""For a client to read why it was refused, while what it still sends is thrown away: with unread
bytes a connection is reset when it is closed, and the answer may be lost."""

SEND_BUFFER_BYTES = 1 << 18
"""Of an answer that the kernel holds for a client that does not read; it takes twice that."""

# What is not seen to for longer than that was not: the event loop was held up.
_MOST_TICK_S = 1.0
# In place of `body_timeout_s` while somebody is refused for want of room.
_PRESSED_S = 1.0
_LOG_EVERY_S = 1.0
# What is read of one connection before the others have their turn. asyncio's 256 KiB, of each of
# many large bodies, would keep a small request waiting for seconds.
_READ_BYTES = 1 << 16

Phase = Literal["head", "come", "body", "working", "sending", "rest", "idle", "leaving"]
"""Of a connection: its next request's head is awaited or coming (idle: nothing of it has come, but
requests before it); some of it has come and is to be looked at; its body is coming; it is being
answered. When the answer is complete: it is being taken by the client; what remains of the body
comes. Or it has been ended."""

_MAX_HEAD_BYTES = 1 << 16
# A head is found in so many bytes, or its client is known by its address.
_HEAD_BYTES = 8192
_TENANT = f"\r\n{TENANT_HEADER}:".lower().encode()


class Connection(H11Protocol):
    """uvicorn's, which says what it waits for and can be ended with an answer.

    Attributes:
        phase: What it waits for.
        handshake: What has come before it where there is TLS.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = StrictParser(_MAX_HEAD_BYTES)
        self.phase: Phase = "head"
        self.handshake: Handshake | None = None
        self._all = connections
        self._left = False
        self._lost = False
        # Whose it is, as far as it is known; what has come of a request and waits for its round.
        self._client = b""
        self._come: bytes | None = None
        self._come_ns = 0
        self._received_bytes = 0
        # When the phase began, or the body's present window did; bytes received until then.
        self._since_s = connections.now_s
        self._window_bytes = 0
        # Bytes that the client has not taken, and since when it has taken none of them.
        self._unsent_bytes = 0
        self._unsent_since_s = connections.now_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio's; a loop of another kind has no such thing, and sets it aside.
        with suppress(AttributeError):
            transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        if self.client is not None:
            self._client = self.client[0].encode()
        if self.handshake is not None:
            self.handshake.complete()
        else:
            set_socket(transport)
        self._all.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._all.leave(self)
        # It ends a request that is under way, which takes as long as to begin one.
        self._all.rounds.put(self._client, partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if self._left:
            return
        self._received_bytes += len(data)
        if self.phase in ("head", "idle", "come"):
            self._wait_for_round(data)
        else:
            super().data_received(data)
            self.look()

    def _wait_for_round(self, data: bytes) -> None:
        """What has come of a request is looked at soon, with what comes until then."""
        if self._come is None:
            self._come, self._come_ns = data, now_ns()
            self._client = self._all.client_of(data[:_HEAD_BYTES]) or self._client
            self._all.rounds.put(self._client, self._take_round)
            self.look()
        else:
            self._come += data
        # Not before, since most requests have come as a whole.
        if len(self._come) >= _READ_BYTES:
            self.transport.pause_reading()

    def _take_round(self) -> None:
        data, self._come = self._come, None
        if self._left or self._lost or self.transport.is_closing() or data is None:
            return
        self.transport.resume_reading()
        self.app_state = {ARRIVED: self._come_ns}
        super().data_received(data)
        self.look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # `Connections` sees to it; uvicorn's would not be set again after the rest of a body.
        self._unset_keepalive_if_required()
        self.look()

    def send_400_response(self, msg: str) -> None:
        self._all.count("malformed")
        self.end(RequestError(f"{msg} Send HTTP/1.1", code="malformed"))

    def shutdown(self) -> None:
        if self._left:
            self.transport.abort()
        # asyncio's transport of TLS is of no use any more when it was closed twice.
        elif not self.transport.is_closing():
            super().shutdown()

    def look(self) -> None:
        """Finds the phase, and tells when it has changed."""
        phase = self._find_phase()
        if phase != self.phase:
            self.phase = phase
            self._begin_window()
            self._all.moved(self)

    def end(self, error: NanoInferenceError | None = None) -> None:
        """Closes the connection; with an error as the answer, unless there is part of another."""
        cycle, answered = self.cycle, False
        scope: Scope = {}
        if cycle is not None and not cycle.response_complete:
            answered = cycle.response_started
            scope = {**cycle.scope}
            cycle.disconnected = True
            cycle.message_event.set()
        if error is None or answered or self.transport.is_closing():
            self.transport.abort()
            return
        # Not through h11, which may have lost its place.
        response = self._all.respond(scope, error)
        head = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
        fields = [b"%s: %s" % field for field in response.raw_headers]
        lines = [head, *fields, b"connection: close", b"", bytes(response.body)]
        self.transport.write(b"\r\n".join(lines))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._left = True
        self.look()

    def check(self, window_s: float) -> Reason | None:
        """Ends the connection when its client is too slow; returns with what it was.

        Args:
            window_s: After so long without enough of its body it is.
        """
        self.look()
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
                # As with any server; nobody was slow.
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
        reading = self.conn.their_state is h11.SEND_BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return "body" if reading else "working"
        if self.transport.get_write_buffer_size():
            return "sending"
        if reading:
            return "rest"
        return "head" if self.cycle is None or self.conn.trailing_data[0] else "idle"


class Connections:
    """Those of a server. Beyond the limit a new one takes the place of another.

    That is the one that has waited longest without a request under way, be it idle or slow with
    its head; so no number of them keeps others out. Of those whose answer is complete but not
    taken, one goes only when there is no such.

    Attributes:
        now_s: A clock that stands still while the event loop is held up, so that no client is
            slow because we are. `sweep` moves it.
        rounds: In which requests begin and end.
        client_of: Whose a request is by the beginning of its head, b"" where that does not say; a
            first look, which decides about turns only.
        respond: As `RequestLimits.respond`.
    """

    def __init__(
        self, config: GatewayConfig, limits: RequestLimits, most: int, measures: Measures
    ) -> None:
        """Args: `most` of them are open at a time."""
        self.now_s = 0.0
        self.rounds = Rounds()
        self.client_of = named_client
        self.config = config
        self.respond = limits.respond
        self._limits = limits
        self._measures = measures
        self._most = most
        self._all: dict[Connection | Handshake, None] = {}
        # Each in the order in which they came into the phase.
        self._waiting: dict[Connection | Handshake, None] = {}
        self._sending: dict[Connection | Handshake, None] = {}
        self._counts: Counter[Reason] = Counter()
        self._logged_s = -_LOG_EVERY_S
        measures.watch(instruments.GATEWAY_CONNECTIONS, self.__len__)

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connection: Connection | Handshake) -> None:
        """A new one is there."""
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
            busy = "all connections have requests under way; try again"
            connection.end(Overloaded(busy, "all_busy"))

    def moved(self, connection: Connection | Handshake) -> None:
        """It has come into another phase."""
        self._forget(connection)
        if connection.phase == "sending":
            self._sending[connection] = None
        elif connection.phase not in ("come", "body", "working"):
            self._waiting[connection] = None

    def leave(self, connection: Connection | Handshake) -> None:
        """It is closed."""
        self._all.pop(connection, None)
        self._forget(connection)

    def end_all(self, error: NanoInferenceError | None = None) -> None:
        """Ends each as `Connection.end` does."""
        for connection in list(self._all):
            connection.end(error)

    def count(self, reason: Reason, number: int = 1) -> None:
        """So many were not served, and why; said about once a second, in one line."""
        self._counts[reason] += number
        self._measures.refused(reason, number)

    def sweep(self, elapsed_s: float) -> None:
        """Ends those whose clients are too slow; called about once a second."""
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
        self._measures.tell()

    def _forget(self, connection: Connection | Handshake) -> None:
        self._waiting.pop(connection, None)
        self._sending.pop(connection, None)


def set_socket(transport: asyncio.BaseTransport) -> None:
    """Has each part of an answer sent without waiting until the client has acknowledged the last,
    and bounds what of it the kernel holds.

    asyncio sees to the first only where the listening socket was made with its protocol's number.
    Without, the body of a small answer, or the next token, is 40 ms late. By itself the kernel
    takes megabytes for a client that reads nothing, whose limits would then never come into play.
    """
    accepted = transport.get_extra_info("socket")
    if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # the client has gone
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def named_client(head: bytes) -> bytes:
    """The tenant that a head names, b"" for none."""
    _, found, rest = head.lower().partition(_TENANT)
    return rest.partition(b"\r\n")[0].strip() if found else b""


def _timeout(message: str) -> RequestError:
    return RequestError(message, code="request_timeout")
