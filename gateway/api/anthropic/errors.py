"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

from ....config import NanoInferenceError
from ...call import Call
from ...server.http import JsonResponse, Response, error_headers, status_of

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

# Anthropic's clients look for these words, and then shorten the conversation.
_TOO_LONG = "prompt is too long"

# Statuses that differ from the gateway's other interfaces.
_STATUS = {"unknown_model": 404}


def error_event(error: NanoInferenceError, call_id: str) -> dict[str, Any]:
    """Return an error, as a body or an event, with our code and param in addition."""
    status = _status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    param = error.param
    message = error.message
    if error.code == "prompt_too_long":
        message = f"{_TOO_LONG}: {message}"
    body: dict[str, Any] = {"type": kind, "message": message, "code": error.code}
    if param == _THREAD:
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return {"type": "error", "error": body | {"param": param}, "request_id": call_id or None}


def is_called(call: Call) -> bool:
    """Return whether a call is for this interface, even without such an endpoint."""
    path = call.path
    of_models = path == MODELS or path.startswith(f"{MODELS}/")
    return path == PATH or path.startswith(f"{PATH}/") or (of_models and has_version(call))


def has_version(call: Call) -> bool:
    """Return whether a call has the version header of Anthropic's clients."""
    return call.header(VERSION_HEADER) is not None


def respond(call: Call, error: NanoInferenceError) -> Response:
    """Return the answer for an error."""
    body = error_event(error, call.id)
    return named(call, JsonResponse(body, _status_of(error), error_headers(error)))


def named(call: Call, response: Response) -> Response:
    """Add the call's id in the logs to an answer."""
    if call.id:
        response.headers[_REQUEST_ID] = call.id
    return response


def _status_of(error: NanoInferenceError) -> int:
    return _STATUS.get(error.code) or status_of(error)
