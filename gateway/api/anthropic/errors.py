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
"""The path of all endpoints."""

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
"""Also an endpoint, with the paths below, for calls with the header of Anthropic's clients."""

VERSION_HEADER = "Anthropic-Version"

# Anthropic's clients read it.
_REQUEST_ID = "Request-Id"

# Anthropic's library asks for a stored conversation, and goes on without after this refusal.
_THREAD = "thread"

# Statuses that differ from the gateway's other interfaces.
_STATUS = {"unknown_model": 404}


def error_event(error: NanoInferenceError, call_id: str) -> dict[str, Any]:
    """Return an error, as a body or an event, with our code and param in addition."""
    status = _status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    param: str | None = getattr(error, "param", None)
    told: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code}
    if param == _THREAD:
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return {"type": "error", "error": told | {"param": param}, "request_id": call_id or None}


def is_called(scope: Scope) -> bool:
    """Return whether a call is for this interface, even without such an endpoint."""
    path: str = scope.get("path", "")
    of_models = path == MODELS or path.startswith(f"{MODELS}/")
    return path == PATH or path.startswith(f"{PATH}/") or (of_models and has_version(scope))


def has_version(scope: Scope) -> bool:
    """Return whether a call has the version header of Anthropic's clients."""
    return VERSION_HEADER in Headers(scope=scope)


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """Return the answer for an error."""
    call_id = call_id_of(scope)
    body = error_event(error, call_id)
    return _named(call_id, JsonResponse(body, _status_of(error), error_headers(error)))


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer for anything that an endpoint raised."""
    return named(request, answer_failure(request, error, partial(respond, request.scope)))


ERRORS = Middleware(ExceptionMiddleware, handlers={Exception: answer_error})
"""Errors in Anthropic's form, also those of a stream that has not begun."""


def named(request: Request, response: Response) -> Response:
    """Add the call's id in the logs to an answer."""
    return _named(call_id_of(request.scope), response)


def _named(call_id: str, response: Response) -> Response:
    if call_id:
        response.headers[_REQUEST_ID] = call_id
    return response


def _status_of(error: NanoInferenceError) -> int:
    return _STATUS.get(error.code) or status_of(error)
