"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ....config import NanoInferenceError
from ...server.http import JsonResponse, answer_failure, call_id_of, error_headers, status_of

PATH = "/v1/messages"
"""Below it are all endpoints."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

MODELS = "/v1/models"
"""So are it and what is below it, for calls with the header of Anthropic's clients."""

VERSION_HEADER = "Anthropic-Version"

# Where Anthropic's clients look for it.
_REQUEST_ID = "Request-Id"

# Anthropic's library asks for a conversation to be kept, and goes on without when it is told so.
_THREAD = "thread"

# Another than that of the gateway's other interfaces.
_STATUS = {"unknown_model": 404}


def error_event(error: NanoInferenceError, call_id: str) -> dict[str, Any]:
    """An error, in a body or as an event. What the gateway knows beyond Anthropic stands within."""
    status = _status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    param: str | None = getattr(error, "param", None)
    told: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code}
    if param == _THREAD:
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return {
        "type": "error",
        "error": told | {"param": param},
        "request_id": call_id or None,
    }


def is_called(scope: Scope) -> bool:
    """Whether a call is of this interface, be there such an endpoint or not."""
    path: str = scope.get("path", "")
    of_models = path == MODELS or path.startswith(f"{MODELS}/")
    return path == PATH or path.startswith(f"{PATH}/") or (of_models and has_version(scope))


def has_version(scope: Scope) -> bool:
    """Whether a call says which version of Anthropic's interface it is for."""
    return VERSION_HEADER in Headers(scope=scope)


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """The answer to a call that has an error."""
    call_id = call_id_of(scope)
    body = error_event(error, call_id)
    return _named(call_id, JsonResponse(body, _status_of(error), error_headers(error)))


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer to whatever an endpoint raised."""
    return named(request, answer_failure(request, error, partial(respond, request.scope)))


ERRORS = Middleware(ExceptionMiddleware, handlers={Exception: answer_error})
"""Errors have a shape of their own, those of a stream that has not begun included."""


def named(request: Request, response: Response) -> Response:
    """An answer that says what logs call it."""
    return _named(call_id_of(request.scope), response)


def _named(call_id: str, response: Response) -> Response:
    if call_id:
        response.headers[_REQUEST_ID] = call_id
    return response


def _status_of(error: NanoInferenceError) -> int:
    return _STATUS.get(error.code) or status_of(error)
