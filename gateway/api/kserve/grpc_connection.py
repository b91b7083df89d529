"""A call over gRPC by its two ends: what comes, what goes, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import anyio
import grpc
from google.protobuf.message import DecodeError, Message
from starlette.types import Scope

from ....config import GatewayConfig, RequestError
from ....kserve.protobuf import Method
from ...server.limits import Overloaded
from ...serving.measures import Reason
from ...serving.origin import BUDGET_HEADER
from .endings import Endings
from .grpc_fields import check_fields

LEAST_BYTES_PER_S = 1 << 16
"""gRPC does not tell how far a message has come. So one may take as long as the largest that is
taken, or as its own size, takes at this speed, beyond what the settings give whoever is slow."""


class Waiting:
    """Calls of which the next message is awaited.

    Whoever begins many and says nothing does not keep others out: beyond the limit the one that has
    waited longest ends, unless it is being served.

    Attributes:
        streams: Those of them that may go on for long; `close` it before the gateway stops.
        count: Is told of each call that was ended for its client's doing, and why.
    """

    def __init__(self, most: int, count: Callable[[Reason], None]) -> None:
        """Args: `most` may wait."""
        self.streams = Endings()
        self.count = count
        self._all = Endings()
        self._most = most

    async def first(self, context: Any) -> bytes | None:
        """The one message of a call; None when there is none.

        Raises:
            NanoInferenceError: The call is to end.
        """
        with self._waits(lambda: True):
            return _message(await context.read())

    async def next(self, context: Any, rests: Callable[[], bool]) -> bytes | None:
        """The next message of a stream; None when the client has sent its last.

        Args:
            context: gRPC's.
            rests: Whether none of those before it is being served.

        Raises:
            NanoInferenceError: The stream is to end.
        """
        with self._waits(rests), self.streams.open():
            return _message(await context.read())

    @contextmanager
    def _waits(self, rests: Callable[[], bool]) -> Iterator[None]:
        if len(self._all) >= self._most:
            busy = "many calls wait for their next message, and this one has waited longest; begin "
            if self._all.give_way(Overloaded(f"{busy}another one", "replaced")):
                self.count("replaced")
        with self._all.open(rests):
            yield


class GrpcConnection:
    """What one call sends and receives.

    Attributes:
        sent_bytes: Of its answers.
    """

    def __init__(
        self, context: Any, method: Method, config: GatewayConfig, waiting: Waiting
    ) -> None:
        """Args: `context` is gRPC's."""
        self.sent_bytes = 0
        self._context = context
        self._method = method
        self._config = config
        self._waiting = waiting
        self._stuck: RequestError | None = None

    async def request(self) -> tuple[Any, int]:
        """The one message of a call that has one, and its size in bytes.

        Raises:
            RequestError: malformed, request_timeout, request_too_large.
            Overloaded: The call has waited too long for it.
        """
        config = self._config
        limit_s = config.body_timeout_s + config.max_body_bytes / LEAST_BYTES_PER_S
        try:
            with anyio.fail_after(limit_s):
                data = await self._waiting.first(self._context)
        except TimeoutError:
            self._waiting.count("slow_body")
            raise _too_slow("no whole message came; send it at once") from None
        if data is None:
            raise RequestError(
                "the call brings no message, or one larger than gateway.max_body_bytes",
                code="request_too_large",
            )
        return self._decoded(data), len(data)

    async def next_request(self, rests: Callable[[], bool]) -> tuple[Any, int] | None:
        """The next message of a stream and its size in bytes; None behind the last.

        Args:
            rests: As of `Waiting.next`.

        Raises:
            RequestError: malformed, request_too_large.
            NanoInferenceError: The stream is to end.
        """
        data = await self._waiting.next(self._context, rests)
        return None if data is None else (self._decoded(data), len(data))

    async def send(self, answer: Message) -> None:
        """Returns when gRPC has taken an answer, which is when the client takes what came before.

        Raises:
            RequestError: request_timeout: the client takes nothing.
        """
        if self._stuck is not None:
            raise self._stuck
        data = answer.SerializeToString()
        limit_s = self._config.send_timeout_s + len(data) / LEAST_BYTES_PER_S
        try:
            with anyio.fail_after(limit_s):
                try:
                    await self._context.write(data)
                except grpc.aio.InternalError:
                    # The client has gone, and gRPC cancels this as soon as it sees that.
                    await anyio.sleep_forever()
        except TimeoutError:
            self._waiting.count("slow_reader")
            self._stuck = _too_slow("the answer was not taken; read it at once")
            raise self._stuck from None
        self.sent_bytes += len(data)

    def _decoded(self, data: bytes) -> Any:
        check_fields(self._method, data)
        try:
            return self._method.request.FromString(data)
        except DecodeError:
            raise RequestError(
                f"the message is no {self._method.request.DESCRIPTOR.full_name}; make it of the "
                "service's inference.proto",
                code="malformed",
            ) from None


def scope_of(context: Any, path: str, scheme: str) -> Scope:
    """A call as the rest of the gateway knows calls, which it is: a POST over HTTP/2. gRPC's own
    deadline is a budget like any other."""
    headers = [(key.lower().encode(), _encoded(value)) for key, value in _metadata(context)]
    left_s = context.time_remaining()
    if left_s is not None:
        headers.append((BUDGET_HEADER.lower().encode(), b"%.3f" % (left_s * 1e3)))
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "scheme": scheme,
        "client": client_of(context.peer()),
        "state": {},
    }


def client_of(peer: str) -> tuple[str, int] | None:
    """The address and port of who calls, as gRPC names him: "ipv4:127.0.0.1:5", or
    "ipv6:%5B::1%5D:5"; None of any other kind."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def _metadata(context: Any) -> Any:
    return context.invocation_metadata() or ()


def _encoded(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")


def _message(found: Any) -> bytes | None:
    return None if found is grpc.aio.EOF else found


def _too_slow(message: str) -> RequestError:
    return RequestError(message, code="request_timeout")
