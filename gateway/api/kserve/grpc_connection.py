"""A gRPC call's two ends: received messages, sent messages, and the time limits of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import unquote

import anyio
import grpc
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode

from ....config import GatewayConfig, NanoInferenceError, RequestError
from ....kserve.parameters import CODE_KEY
from ....kserve.protobuf import Method, ModelInferRequest
from ...call import BUDGET_HEADER, Call
from ...server.http import error_headers, identify, status_of
from ...server.limits import Overloaded
from ...server.measures import Reason

LEAST_BYTES_PER_S = 1 << 16
"""Beyond the configured time, a message may take as long as its bytes take at this speed. gRPC
doesn't report how much of a message has come, so the largest accepted size counts for requests."""

MOST_FIELDS = 16_384
"""The most fields of a request, including its tensors' and parameters': a dozen per tensor."""

MOST_BYTES = 1 << 16
"""The most bytes of a message without tensors."""

# The fields of ModelInferRequest that are messages: parameters, inputs and outputs.
_NESTED = (4, 5, 6)


# --- errors ---------------------------------------------------------------------------------------

_CODES: dict[int, StatusCode] = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's codes by HTTP status."""

# The sentence travels as a header. Clients accept 8 KiB, and each byte may be escaped as three.
_MOST_CHARACTERS = 600


class GrpcFailure(NamedTuple):
    """An error in gRPC's terms.

    Attributes:
        error: The error.
        status: Its status over HTTP.
        code: gRPC's code.
        details: Its sentence, shortened to fit a trailer.
    """

    error: NanoInferenceError
    status: int
    code: StatusCode
    details: str

    def trailers(self) -> dict[str, str]:
        """Return the trailing metadata: the stable code, and when to retry."""
        headers = {name.lower(): value for name, value in error_headers(self.error).items()}
        return {CODE_KEY: self.error.code} | headers


def failure_of(error: NanoInferenceError) -> GrpcFailure:
    """Return an error in gRPC's terms."""
    status = status_of(error)
    fallback = StatusCode.INTERNAL if status >= 500 else StatusCode.INVALID_ARGUMENT
    code = _CODES.get(status, fallback)
    if error.code == "unsupported":
        code = StatusCode.UNIMPLEMENTED
    details = error.message
    if len(details) > _MOST_CHARACTERS:
        details = f"{details[:_MOST_CHARACTERS]}..."
    return GrpcFailure(error, status, code, details)


# --- calls that can be ended ----------------------------------------------------------------------


class OpenScopes:
    """Work in progress that other code can end with an error, oldest first."""

    def __init__(self) -> None:
        self._open: dict[anyio.CancelScope, Callable[[], bool]] = {}
        self._reasons: dict[anyio.CancelScope, NanoInferenceError] = {}
        self._closed: NanoInferenceError | None = None

    def __len__(self) -> int:
        """Number of scopes that were not ended."""
        return len(self._open)

    @contextmanager
    def open(self, is_idle: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Hold work that can be ended.

        Args:
            is_idle: Whether `end_oldest` may end it.

        Raises:
            NanoInferenceError: It was ended, with this error.
        """
        if self._closed is not None:
            raise self._closed
        scope = anyio.CancelScope()
        self._open[scope] = is_idle
        try:
            with scope:
                yield
        finally:
            self._open.pop(scope, None)
            reason = self._reasons.pop(scope, None)
        if reason is not None and scope.cancelled_caught:
            raise reason

    def end_oldest(self, error: NanoInferenceError) -> bool:
        """End the oldest idle scope. Returns whether there was one."""
        found = next((scope for scope, is_idle in self._open.items() if is_idle()), None)
        if found is not None:
            self._end(found, error)
        return found is not None

    def close(self, error: NanoInferenceError) -> None:
        """End all scopes, and refuse new ones."""
        self._closed = error
        for scope in list(self._open):
            self._end(scope, error)

    def _end(self, scope: anyio.CancelScope, error: NanoInferenceError) -> None:
        del self._open[scope]
        self._reasons[scope] = error
        scope.cancel()


class WaitingCalls:
    """Calls that wait for a message.

    Clients that open many calls and send nothing can't shut out others: beyond the limit the
    longest-waiting idle call ends.

    Attributes:
        streams: The waiting streams; `close` it before the gateway stops.
        count: Counts calls that were ended because of their clients, by reason.
    """

    def __init__(self, most: int, count: Callable[[Reason], None]) -> None:
        """Args: the most waiting calls."""
        self.streams = OpenScopes()
        self.count = count
        self._all = OpenScopes()
        self._most = most

    async def read(self, context: Any, is_idle: Callable[[], bool] | None = None) -> bytes | None:
        """Return the next message; None after the last.

        Args:
            context: gRPC's.
            is_idle: For a stream: whether none of its requests is being served. None for a call
                with one message.

        Raises:
            NanoInferenceError: The call is to end.
        """
        if len(self._all) >= self._most:
            message = "many calls wait for their next message, and this one has waited longest; "
            if self._all.end_oldest(Overloaded(f"{message}begin another one")):
                self.count("replaced")
        with (
            self._all.open(is_idle or (lambda: True)),
            nullcontext() if is_idle is None else self.streams.open(),
        ):
            found = await context.read()
        return None if found is grpc.aio.EOF else found


# --- a call ---------------------------------------------------------------------------------------


@dataclass
class GrpcConnection:
    """The messages of one call.

    Attributes:
        context: gRPC's.
        method: The called method.
        config: The gateway's settings.
        waiting: Reads the messages.
        sent_bytes: Bytes of its responses.
    """

    context: Any
    method: Method
    config: GatewayConfig
    waiting: WaitingCalls
    sent_bytes: int = 0
    _stuck: RequestError | None = None

    async def request(self) -> tuple[Any, int]:
        """Return the message of a unary call, and its size in bytes.

        Raises:
            RequestError: malformed, request_timeout, request_too_large.
            Overloaded: The call has waited longest of too many.
        """
        config = self.config
        limit_s = config.body_timeout_s + config.max_body_bytes / LEAST_BYTES_PER_S
        try:
            with anyio.fail_after(limit_s):
                data = await self.waiting.read(self.context)
        except TimeoutError:
            self.waiting.count("slow_body")
            raise RequestError(
                "no whole message came; send it at once", code="request_timeout"
            ) from None
        if data is None:
            raise RequestError(
                "the call brings no message, or one larger than gateway.max_body_bytes",
                code="request_too_large",
                remedy="send one, or less at a time",
            )
        return self._decoded(data), len(data)

    async def next_request(self, is_idle: Callable[[], bool]) -> tuple[Any, int] | None:
        """Return the next message of a stream and its size; None after the last.

        Args:
            is_idle: As of `WaitingCalls.read`.

        Raises:
            RequestError: malformed, request_too_large.
            NanoInferenceError: The stream is to end.
        """
        data = await self.waiting.read(self.context, is_idle)
        return None if data is None else (self._decoded(data), len(data))

    async def send(self, answer: Message) -> None:
        """Send a response; returns when gRPC has room, that is when the client reads.

        Raises:
            RequestError: request_timeout: the client doesn't read.
        """
        if self._stuck is not None:
            raise self._stuck
        data = answer.SerializeToString()
        limit_s = self.config.send_timeout_s + len(data) / LEAST_BYTES_PER_S
        try:
            with anyio.fail_after(limit_s):
                try:
                    await self.context.write(data)
                except grpc.aio.InternalError:
                    # The client has gone; gRPC cancels this task when it notices.
                    await anyio.sleep_forever()
        except TimeoutError:
            self.waiting.count("slow_reader")
            self._stuck = RequestError(
                "the answer was not taken; read it at once", code="request_timeout"
            )
            raise self._stuck from None
        self.sent_bytes += len(data)

    def _decoded(self, data: bytes) -> Any:
        check_fields(self.method, data)
        try:
            return self.method.request.FromString(data)
        except DecodeError:
            raise RequestError(
                f"the message is no {self.method.request.DESCRIPTOR.full_name}; make it of the "
                "service's inference.proto",
                code="malformed",
            ) from None


def call_of(context: Any, path: str, scheme: str) -> Call:
    """Return a call, a POST over HTTP/2; gRPC's deadline becomes a budget."""
    headers = [
        (
            key.lower().encode(),
            value if isinstance(value, bytes) else value.encode("latin-1", "replace"),
        )
        for key, value in context.invocation_metadata() or ()
    ]
    left_s = context.time_remaining()
    if left_s is not None:
        headers.append((BUDGET_HEADER.lower().encode(), b"%.3f" % (left_s * 1e3)))
    address, _ = client_of(context.peer()) or ("", 0)
    call = Call(path=path, route=path, headers=headers, scheme=scheme, address=address)
    identify(call)
    return call


def client_of(peer: str) -> tuple[str, int] | None:
    """Return the address and port of gRPC's peer, such as "ipv4:127.0.0.1:5" or
    "ipv6:%5B::1%5D:5"; None of another kind."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


# --- the fields of a message ----------------------------------------------------------------------


class _MalformedError(ValueError):
    """Bytes that are no message. Decoding reports it."""


def check_fields(method: Method, data: bytes) -> None:
    """Refuse a message with too many fields before it is decoded.

    Protobuf's objects of tiny fields take twenty times their size, and seconds for as many as fit a
    message. Malformed bytes pass, since decoding reports them.

    Raises:
        RequestError: request_too_large.
    """
    what = ""
    if method.request is not ModelInferRequest:
        if len(data) > MOST_BYTES:
            what = f"has more than {MOST_BYTES} bytes and no tensors"
    # The smallest field has two bytes.
    elif len(data) > 2 * MOST_FIELDS and count_fields(data) > MOST_FIELDS:
        what = f"has more than {MOST_FIELDS} tensors, parameters and fields of these"
    if what:
        raise RequestError(f"the message {what}; send less at a time", code="request_too_large")


def count_fields(data: bytes) -> int:
    """Return the number of fields of a message and its nested ones; stop beyond the limit."""
    number = 0
    with suppress(_MalformedError):
        for field, begin, end in _fields(data, 0, len(data)):
            number += 1
            nested = _fields(data, begin, end) if field in _NESTED else ()
            number += sum(1 for _ in islice(nested, MOST_FIELDS))
            if number > MOST_FIELDS:
                break
    return number


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field, and where its bytes begin and end."""
    while at < end:
        tag, begin = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, begin)
            case 1:
                at = begin + 8
            case 5:
                at = begin + 4
            case 2:
                length, begin = _varint(data, begin)
                at = begin + length
            case _:
                # Decoding skips groups, but fields after them would not be counted.
                raise RequestError(
                    "the message has groups; make it of the service's inference.proto",
                    code="malformed",
                )
        yield tag >> 3, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = shift = 0
    for end, byte in enumerate(data[at : at + 10], at + 1):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end
        shift += 7
    raise _MalformedError
