"""Bodies in, answers and errors out: what every interface of the gateway shares."""

from __future__ import annotations

import gc
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...config import BusError, NanoInferenceError, RequestError, WeightsError, shown, told_of
from ...config.logger import get_logger

T = TypeVar("T")

MOST_CONTAINERS = 500_000
"""Lists and objects of one body: some for each of its prompts, one for each tensor of a model."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

# In msgspec's messages, where a value stands.
_PLACE = re.compile(r"`\$\.?([^`]+)`$")

CALL_ID = "call_id"
"""Under which a call's state has what the call is named."""

ERROR_CODE = "error_code"
"""Under which it has the code of the error that it was answered with."""

CLIENT_LEFT = 499
"""The status, seen by nobody, of a request whose client has closed the connection."""

TOO_MANY = 429
"""The status of what is refused because others came first; it always says when to come again."""

BODY = "body"
"""Under which it has its body, where somebody has read that to find out who answers."""

MODEL = "model"
"""Under which it has the id of the model that answers, where there are several."""

NAMED_MODEL = "named_model"
"""Under which it has the model's name as the call's address, query or SGLang body gives it."""

DEFAULT_RETRY_S = 1.0
"""When that is, where nobody knows better."""

_STATUS = {
    "missing_api_key": 401,
    "invalid_api_key": 401,
    "insufficient_scope": 403,
    "rate_limit_exceeded": 429,
    "policy_unavailable": 503,
    "unknown_key": 404,
    "unknown_tenant": 404,
    "request_too_large": 413,
    "model_not_found": 404,
    "unknown_model": 404,
    "model_not_loaded": 503,
    "model_exists": 409,
    "out_of_memory_budget": 503,
    "adapter_not_found": 404,
    "adapter_unloaded": 404,
    "adapter_busy": 409,
    "adapter_in_use": 409,
    "stream_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "unknown_response": 404,
    "unknown_region": 404,
    "unsupported": 400,
    "shared_memory_off": 403,
    "forbidden_host": 403,
    "forbidden_origin": 403,
    "request_timeout": 408,
    "idempotency_key_reused": 422,
    "unsupported_media_type": 415,
    "overloaded": 429,
    "shutting_down": 503,
    "not_ready": 503,
    "weights_interrupted": 503,
    "out_of_memory": 503,
    "weights_timeout": 504,
    "expired": 504,
    "lane_failed": 500,
    "weights_lost": 500,
    "out_of_blocks": 500,
    "internal_error": 500,
}


_KINDS = {401: "authentication_error", 403: "permission_error", TOO_MANY: "rate_limit_error"}

Respond = Callable[[Scope, NanoInferenceError], Response]
"""The answer to a call of this scope that has an error."""


class SendEvent(Protocol):
    """Sends an event of a stream."""

    async def __call__(self, data: bytes, event_id: str = "", *, name: str = "") -> None:
        """Args: its data, on one line; its id, without which it has the last event's; its name."""


class JsonResponse(Response):
    """JSON by msgspec: numbers that JSON has no word for are null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EngineError(RequestError):
    """The engine has refused a request or failed it; `retry_after_s` as in `ErrorInfo`."""

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class FieldError(RequestError):
    """A field of the body can't be obeyed.

    Attributes:
        param: Which one, as a path in the body.
    """

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_request") -> None:
        super().__init__(message, code=code)
        self.param = param


def status_of(error: NanoInferenceError) -> int:
    """The HTTP status of an error: 4xx when the client can change something, else 5xx."""
    if error.code in _STATUS:
        return _STATUS[error.code]
    if isinstance(error, RequestError | WeightsError):
        return 400
    return 503 if isinstance(error, BusError) else 500


def error_body(error: NanoInferenceError) -> dict[str, Any]:
    """An error as OpenAI's and SGLang's clients read it."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param: str | None = getattr(error, "param", None)
    told = {"message": error.message, "type": kind, "param": param, "code": error.code}
    return {"error": told}


def error_response(error: NanoInferenceError, more: dict[str, Any] | None = None) -> Response:
    """Args: `more` stands beside the error."""
    body = {**(more or {}), **error_body(error)}
    return JsonResponse(body, status_of(error), error_headers(error))


def error_headers(error: NanoInferenceError) -> dict[str, str]:
    """What an error says to programs that try again, in any interface."""
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None and status_of(error) == TOO_MANY:
        retry_after_s = DEFAULT_RETRY_S
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == "expired":
        # OpenAI's clients try again after any 5xx; here they would take the same time once more.
        headers["X-Should-Retry"] = "false"
    return headers


def respond_plainly(scope: Scope, error: NanoInferenceError) -> Response:
    """As OpenAI's and SGLang's clients read it, whatever is called."""
    return error_response(error)


def error_handler(respond: Respond) -> Callable[[Request, Exception], Awaitable[Response]]:
    """What answers to whatever a handler raised, or that there is no handler."""

    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return answer_failure(request, error, partial(respond, request.scope))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {shown(request.url.path)}: {error.detail}"
        if methods := (error.headers or {}).get("Allow"):
            message += f"; call it by {methods}"
        response = respond(request.scope, RequestError(message, code=code))
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    return answer


def answer_failure(
    request: Request, error: Exception, respond: Callable[[NanoInferenceError], Response]
) -> Response:
    """The answer to what an endpoint raised, which is logged where it is not the client's doing.

    Args:
        respond: Puts an error as the interface's clients read it.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    log = get_logger().bind(path=request.url.path, call_id=call_id_of(request.scope))
    if not isinstance(error, NanoInferenceError):
        log.error("http_handler_failed", exc_info=error)
        return respond(NanoInferenceError("the gateway has failed; its log says where"))
    # Load that is shed (429) is counted where it is shed; a line for each would be more load.
    if status_of(error) >= 500:
        log.warning("http_request_failed", code=error.code, error=error.message)
    return respond(error)


def call_id_of(scope: Scope) -> str:
    """What a call is named, or nothing where nobody has named it."""
    named: str = scope.get("state", {}).get(CALL_ID, "")
    return named


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestError: request_too_large. It is noticed before more than that is in memory.
        ClientDisconnect: The connection was closed before the end.
    """
    read: bytes | None = request.scope.get("state", {}).pop(BODY, None)
    if read is not None:
        return read
    too_large = RequestError(
        f"the body is larger than {max_bytes} bytes; send less at a time",
        code="request_too_large",
    )
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > max_bytes:
        raise too_large
    # What it gives in the end is what it has, and no copy, which of tensors takes time.
    body = BytesIO()
    async for part in request.stream():
        body.write(part)
        if body.tell() > max_bytes:
            raise too_large
    return body.getvalue()


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object; one without a body is empty.

    Raises:
        RequestError: malformed, request_too_large.
    """
    return decode_object(await read_body(request, max_bytes))


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object; without anything but spaces an empty one. Of names alike the last counts.

    Raises:
        RequestError: malformed; request_too_large, of what takes seconds to be made, and a hundred
            times its size in memory.
    """
    if not body or body.isspace():
        return {}
    check_containers(body)
    # What is made here is not garbage yet, and looking for some takes far longer than decoding.
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="malformed") from None
    # msgspec's own errors are kinds of ValueError, and so are those of text and of numbers.
    except (ValueError, OverflowError) as error:
        raise RequestError(f"the body is not a JSON object: {error}", code="malformed") from None
    finally:
        if collects:
            gc.enable()


def check_containers(json: bytes) -> None:
    """Refuses JSON that takes seconds to be decoded, and a hundred times its size in memory.

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


def convert(found: Any, kind: type[T], what: str = "the body") -> T:
    """A value as a struct or another type.

    Raises:
        FieldError: It is none; the message names the field.
    """
    try:
        return msgspec.convert(found, kind, str_keys=True)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        param = place[1] if place else None
        raise FieldError(f"{what}: {told_of(error)}", param=param) from None


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`, and cancel it when the client closes the connection.

    Args:
        receive: The request's, whose body must have been read.

    Raises:
        ClientDisconnect: The client closed the connection.
        NanoInferenceError, TimeoutError: `work` raised it.
    """
    results: list[T] = []
    failure: Exception | None = None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work())
        except (NanoInferenceError, TimeoutError) as error:
            # Not through the group, which would wrap it.
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise ClientDisconnect
    return results[0]


class EventStream(Response):
    """Server-sent events, written until the client closes the connection.

    The answer begins with the first event: what goes wrong before that is answered with a status,
    like an error of any other call.

    Starlette's StreamingResponse takes a generator, which it leaves as it is when the client goes
    while an event is being sent; what the generator holds would then end some time later.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[SendEvent], Awaitable[None]],
        comment_s: float | None = None,
        comment: bytes = b": keep-alive",
    ) -> None:
        """`produce` is called with a function that sends an event's data.

        What NanoInferenceErrors it raises must come before the first event, or before the first
        comment: after `comment_s` seconds without an event there is one (an interface may have an
        event of its own for that, which is given as it stands), so that nobody on the way takes
        the connection for a dead one. `committed` tells whether the answer has begun.
        """
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._produce = produce
        self._comment_s = comment_s
        self._comment = comment + b"\n\n"
        self.committed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = anyio.Lock(fast_acquire=True)
        sent_at = anyio.current_time()

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
                sent_at = anyio.current_time()

        async def send_event(data: bytes, event_id: str = "", *, name: str = "") -> None:
            named = f"event: {name}\n".encode() if name else b""
            named += b"id: %s\n" % event_id.encode() if event_id else b""
            await send_part(named + b"data: " + data + b"\n\n")

        async def comment(every_s: float) -> None:
            while True:
                await anyio.sleep_until(sent_at + every_s)
                # Who does not read what was sent needs no comment.
                if sending.locked():
                    await anyio.sleep(every_s)
                elif anyio.current_time() >= sent_at + every_s:
                    await send_part(self._comment)

        async def respond() -> None:
            failure: Exception | None = None
            async with anyio.create_task_group() as group:
                if self._comment_s is not None:
                    group.start_soon(comment, self._comment_s)
                try:
                    await self._produce(send_event)
                except (NanoInferenceError, TimeoutError) as error:
                    # Not through the group, which would wrap it.
                    failure = error
                group.cancel_scope.cancel()
            if failure is not None:
                raise failure
            await begin()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with suppress(ClientDisconnect):
            await while_connected(receive, respond)
