"""Request bodies, responses, errors and event streams, shared by all interfaces."""

from __future__ import annotations

import asyncio
import gc
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse as PlainTextResponse
from starlette.responses import RedirectResponse as RedirectResponse
from starlette.responses import Response as Response
from starlette.responses import StreamingResponse as StreamingResponse
from starlette.types import Receive, Scope, Send

from ...bus.public import Completion
from ...config import (
    BusError,
    NanoInferenceError,
    RequestError,
    WeightsError,
    line_safe,
    nearest,
    shown,
)
from ...config import FieldError as FieldError
from ...config import field_error as field_error
from ...config.error_codes import statuses
from ...config.logger import get_logger
from ...config.wrong_values import place_of, told_of, values_at
from ...telemetry import now_ns
from ..call import CLIENT_LEFT, Account, Call, ClientLeft, never, no_time

T = TypeVar("T")

MOST_CONTAINERS = 500_000
"""Most lists and objects of one body: a few for each prompt, one for each tensor of a model."""

# The transport's buffer takes this much before it is asked for room. Copies of 1 MiB take twice as
# long, because memory of that size is new each time.
_SENT_BYTES = 1 << 18

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

# Keys of a scope's state.
ARRIVED, UNREAD = "arrived_ns", "unread_ns"
"""When a call's head came, before it waited for a round; for how long its client has not read."""

MAY_RETURN = "may_return"
"""As of a `Call`; of a connection that can be cut on request."""

NAMED_MODEL = "named_model"
"""The model's name in a call's address."""

_NEAR = 0.85

_NOT_OFFERED = frozenset(
    (
        *("assistants", "audio", "containers", "evals", "fine_tuning", "images", "moderations"),
        *("organization", "realtime", "skills", "threads", "vector_stores", "videos"),
    )
)
"""First names of OpenAI's paths that no interface here has."""

_CALL = "call"
"""The call, of a scope's state."""

CALL_HEADER = "X-Request-Id"
"""The call's id, by the client or else the gateway; in the response and the log."""

_MAX_CALL_ID_LENGTH = 128

TOO_MANY = 429
"""The status of a request refused for load; the response always has `Retry-After`."""

DEFAULT_RETRY_S = 1.0
"""`Retry-After`, if the load doesn't say more."""

_STATUS = statuses()
_KINDS = {401: "authentication_error", 403: "permission_error", TOO_MANY: "rate_limit_error"}

Endpoint = Callable[[Call], Awaitable[Response]]
"""Answers calls. Raises NanoInferenceError, and `ClientLeft`."""

Respond = Callable[[Call, NanoInferenceError], Response]
"""Returns the response to a call that has an error."""


class SendEvent(Protocol):
    """Sends an event of a stream."""

    async def __call__(self, data: bytes, event_id: str = "", *, name: str = "") -> None:
        """Args: the data, on one line; the event's id, "" for the last event's; its name."""


class JsonResponse(Response):
    """JSON by msgspec. NaN and infinities are null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class PartsResponse(Response):
    """A body of several parts, sent without joining them first."""

    def __init__(self, parts: Sequence[bytes | memoryview], headers: dict[str, str]) -> None:
        super().__init__(headers=headers)
        self._parts = parts
        self.headers["Content-Length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        for part in self._parts:
            for begin in range(0, len(part), _SENT_BYTES):
                piece = bytes(part[begin : begin + _SENT_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EngineError(RequestError):
    """The engine has refused a request, or failed.

    Attributes:
        completion: The request's terminal message; None without one.
    """

    def __init__(self, what: str, *more: str, completion: Completion | None = None, **given: Any):
        """`completion`: as the attribute; the rest as of `NanoInferenceError`."""
        super().__init__(what, *more, **given)
        self.completion = completion


def status_of(error: NanoInferenceError) -> int:
    """Return the HTTP status of an error: 4xx if the client can change something, else 5xx."""
    if error.code in _STATUS:
        return _STATUS[error.code]
    if isinstance(error, RequestError | WeightsError):
        return 400
    return 503 if isinstance(error, BusError) else 500


def error_body(error: NanoInferenceError) -> dict[str, Any]:
    """Return an error in the form of OpenAI and SGLang."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def error_response(error: NanoInferenceError, more: dict[str, Any] | None = None) -> Response:
    """Return the response to an error. `more`: other fields of the body."""
    body = {**(more or {}), **error_body(error)}
    return JsonResponse(body, status_of(error), error_headers(error))


def error_headers(error: NanoInferenceError) -> dict[str, str]:
    """Return the headers of an error, for programs that retry, in any interface."""
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status_of(error) == TOO_MANY:
        retry_after_s = DEFAULT_RETRY_S
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == "expired":
        # OpenAI's clients retry any 5xx, and would spend the same time again.
        headers["X-Should-Retry"] = "false"
    return headers


def respond_plainly(call: Call, error: NanoInferenceError) -> Response:
    """Return the response to an error in the form of OpenAI and SGLang."""
    return error_response(error)


def error_handler(respond: Respond) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of all exceptions, and of calls without a route. Exceptions are logged,
    unless the client caused them."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientLeft):
            return Response(status_code=CLIENT_LEFT)
        call = call_of(request.scope)
        if isinstance(error, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            path, methods = request.url.path, (error.headers or {}).get("Allow")
            message = f"{request.method} {shown(path)}: {error.detail}"
            if methods:
                message = f"{shown(path)} is not for {request.method}; call it by {methods}"
            elif error.detail == "Not Found":  # by no endpoint, which would say why
                paths = {getattr(route, "path", "") for route in request.app.routes}
                message = f"there is nothing at {shown(path)}{_elsewhere(path, paths)}"
            response = respond(call, RequestError(message, code=code or "http_error"))
            response.status_code = error.status_code
            response.headers.update(error.headers or {})
            return response
        return respond(call, noted(call, error))

    return answer


def noted(call: Call, error: Exception) -> NanoInferenceError:
    """Log an error of a call, unless the client caused it; return the error to answer with."""
    log = get_logger().bind(path=call.path, call_id=call.id)
    if not isinstance(error, NanoInferenceError):
        log.error("http_handler_failed", exc_info=error)
        return NanoInferenceError("the gateway has failed; its log says where")
    # Shed load (429) is counted where it is shed; logging each would add load.
    if status_of(error) >= 500:
        log.warning("http_request_failed", code=error.code, error=str(error))
    return error


def _elsewhere(path: str, paths: Collection[str]) -> str:
    """Return the end of a sentence about a path without an endpoint: one that may be meant."""
    if path.rstrip("/") == "/v1":
        return ", the root of OpenAI's interface; GET /v1/models lists the models"
    if path.removeprefix("/v1/").partition("/")[0] in _NOT_OFFERED:
        return ": it is OpenAI's and not offered here; docs/openai.md lists what is"
    if (whole := f"/v1{path}") in paths:
        return f"; did you mean {whole!r}?"
    return nearest(path, paths, listed=False, cutoff=_NEAR)


def call_of(scope: Scope, receive: Receive | None = None) -> Call:
    """Return the call of a scope, made when it is first asked for.

    Args:
        receive: What its body, and the client's leaving, come from; None for as before.
    """
    state = scope.setdefault("state", {})
    call: Call | None = state.get(_CALL)
    if call is None:
        address, _ = scope.get("client") or ("", 0)
        arrived_ns = state.get(ARRIVED, 0)
        call = state[_CALL] = Call(
            headers=scope.get("headers", ()),
            method=scope.get("method", ""),
            path=scope.get("path", ""),
            query_string=scope.get("query_string", b""),
            scheme=scope.get("scheme", "http"),
            address=address,
            named_model=state.get(NAMED_MODEL, ""),
            at_ns=arrived_ns or now_ns(),
            account=Account(arrived_ns=arrived_ns, unread_ns=state.get(UNREAD, no_time)),
            may_return=state.get(MAY_RETURN, never),
        )
        identify(call)
    if receive is not None:
        call.fetch = partial(_body_of, call, receive)
        call.chunks = partial(_chunks_of, call, receive)
        call.cancelled = partial(_left, receive)
    return call


class Answered(NamedTuple):
    """The response to a call of the gateway itself."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def identify(call: Call) -> None:
    """Set a call's id: the client's, if a header and a log can hold it; else a new one."""
    given = (call.header(CALL_HEADER) or "").strip()
    usable = 0 < len(given) <= _MAX_CALL_ID_LENGTH and given.isascii() and given.isprintable()
    call.id = given if usable else uuid.uuid4().hex


async def _body_of(call: Call, receive: Receive, max_bytes: int) -> bytes:
    """Read the whole body; see `Call.fetch`."""
    too_large = RequestError(
        f"the body is larger than {max_bytes} bytes; send less at a time", code="request_too_large"
    )
    length = call.header("content-length") or ""
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    # BytesIO.getvalue() copies nothing, which matters for tensors.
    body, more = BytesIO(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body.write(message.get("body", b""))
        more = message.get("more_body", False)
        if body.tell() > max_bytes:
            raise too_large
    return body.getvalue()


async def _chunks_of(call: Call, receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body; see `Call.chunks`."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk, more = message.get("body", b""), message.get("more_body", False)
        yield chunk
        call.hold(-len(chunk))


async def _left(receive: Receive) -> None:
    """Return when the client has disconnected, of a request whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_object(call: Call, max_bytes: int) -> dict[str, Any]:
    """Read the body as a JSON object; an empty body is an empty object.

    Raises:
        RequestError: malformed, request_too_large.
    """
    return decode_object(await call.read(max_bytes))


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; blank text is an empty one. The last of equal names counts.

    Raises:
        RequestError: malformed; request_too_large, as `check_containers`.
    """
    if not body or body.isspace():
        return {}
    check_containers(body)
    # Collections during decoding find no garbage, and take far longer than decoding itself.
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError:
        raise RequestError(
            "the body is nested too deeply", code="malformed", remedy="send it flatter"
        ) from None
    # Errors of msgspec, of text and of numbers are ValueErrors.
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"the body is not a JSON object: {error}", code="malformed", remedy="send one"
        ) from None
    finally:
        if collects:
            gc.enable()


def check_containers(json: bytes) -> None:
    """Refuse JSON that would take seconds to decode, and a hundred times its size in memory.

    Raises:
        RequestError: request_too_large.
    """
    if (
        _containers(json) > MOST_CONTAINERS
        and _containers(_STRING.sub(b"", json)) > MOST_CONTAINERS
    ):
        raise RequestError(
            f"the body holds more than {MOST_CONTAINERS} lists and objects; send less at a time",
            code="request_too_large",
        )


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def convert(found: Any, kind: type[T], what: str = "", strict: bool = True) -> T:
    """Convert a value to a struct or another type.

    Args:
        what: The path of the value, such as `messages[0]`; "" for a body.
        strict: Whether a text is no number or boolean.

    Raises:
        FieldError: It has another form; the message names the field.
    """
    try:
        return msgspec.convert(found, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        place = place_of(error)
        values = ", ".join(map(repr, values_at(kind, place)))
        raise FieldError(
            told_of(error, what, found, values), param=place.removesuffix("[...]") or None
        ) from None


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group that raises the first error of its tasks, not an exception group, if all
    errors are NanoInferenceErrors or TimeoutErrors."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failed:
        if failed.split((NanoInferenceError, TimeoutError))[1] is not None:
            raise
        first = failed.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


@asynccontextmanager
async def connected(cancelled: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Within it, work is cancelled when the client leaves.

    Args:
        cancelled: As of a call whose body was read.

    Raises:
        ClientLeft: The client has left.
    """
    if cancelled is anyio.sleep_forever:  # no client's
        yield
        return
    done = False

    async def watch() -> None:
        await cancelled()
        group.cancel_scope.cancel()

    async with task_group() as group:
        group.start_soon(watch)
        yield
        done = True
        group.cancel_scope.cancel()
    if not done:
        raise ClientLeft


class EventStream(Response):
    """Server-sent events, until the client disconnects.

    The response begins with the first event: an error before that is answered with a status, like
    an error of any other call.

    Starlette's StreamingResponse doesn't close its generator when the client disconnects while an
    event is being sent.
    """

    media_type = "text/event-stream"
    _END = b"\n\n"

    def __init__(
        self,
        produce: Callable[[SendEvent], Awaitable[None]],
        comment_s: float | None = None,
        comment: bytes = b": keep-alive",
        *,
        ids: bool = True,
    ) -> None:
        """`produce` is called with a function that sends an event's data.

        After `comment_s` seconds without an event, `comment` is sent (an interface may have an
        event of its own for that), so that proxies don't close the connection. NanoInferenceErrors
        of `produce` must come before the first event or comment; `committed` is whether the
        response has begun. `ids`: whether events have ids, behind which a client may resume; may be
        unset before the first event.
        """
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.produce = produce
        self._comment_s = comment_s
        self._comment = comment + self._END
        self.ids = ids
        self.committed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # asyncio's own: anyio's take ten times as long, for each event.
        sending, now = asyncio.Lock(), asyncio.get_running_loop().time
        sent_at = now()

        async def begin() -> None:
            if not self.committed:
                self.committed = True
                start = {"type": "http.response.start", "status": self.status_code}
                await send(start | {"headers": self.raw_headers})

        async def send_part(part: bytes) -> None:
            nonlocal sent_at
            async with sending:
                await begin()
                await send({"type": "http.response.body", "body": part, "more_body": True})
                sent_at = now()

        async def send_event(data: bytes, event_id: str = "", *, name: str = "") -> None:
            await send_part(self._head(event_id, name) + line_safe(data) + self._END)

        left, every_s = False, inf if self._comment_s is None else self._comment_s

        async def watch() -> None:
            """Send comments until the client has left."""
            nonlocal left
            due_s = sent_at + every_s
            while True:
                with anyio.CancelScope(deadline=due_s):
                    await _left(receive)
                    left = True
                    group.cancel_scope.cancel()
                    return
                due_s = sent_at + every_s
                if sending.locked():  # a client that doesn't read needs no comment
                    due_s = now() + every_s
                elif now() >= due_s:
                    await send_part(self._comment)

        async with task_group() as group:
            group.start_soon(watch)
            try:
                await self.produce(send_event)
            except ClientLeft:
                left = True
            if not left:  # in the turn of the last event, with which the end is sent
                await begin()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()

    def _head(self, event_id: str, name: str) -> bytes:
        """Return the lines of an event before its data, and the beginning of the data's."""
        head = f"event: {name}\n".encode() if name else b""
        head += b"id: %s\n" % event_id.encode() if event_id and self.ids else b""
        return head + b"data: "


class LineStream(EventStream):
    """Lines of JSON, without ids and names, until the client disconnects. A comment is a line of
    JSON, too: readers of such streams know nothing else."""

    media_type = "application/x-ndjson"
    _END = b"\n"

    def _head(self, event_id: str, name: str) -> bytes:
        return b""
