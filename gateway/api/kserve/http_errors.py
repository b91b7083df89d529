"""Errors as Triton's clients read them over HTTP."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from ....config import NanoInferenceError
from ...server.http import JsonResponse, error_headers, status_of

PATH = "/v2"
"""It, and what is below it, are all endpoints."""

CODE_HEADER = "X-Error-Code"
"""The header of an answer that has its error's stable code; the body has a sentence alone."""

_INFER = "/infer"


def is_called(scope: Scope) -> bool:
    """Whether a call is of this interface, be there such an endpoint or not."""
    path: str = scope.get("path", "")
    return path == PATH or path.startswith(f"{PATH}/")


def takes_compressed(scope: Scope) -> bool:
    """Whether a call is of an endpoint that unpacks bodies."""
    path: str = scope.get("path", "")
    return is_called(scope) and path.endswith(_INFER)


def error_body(error: NanoInferenceError) -> dict[str, str]:
    """An error, in a body or as an event."""
    return {"error": error.message}


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """The answer to a call that has an error."""
    headers = error_headers(error) | {CODE_HEADER: error.code}
    return JsonResponse(error_body(error), status_of(error), headers)
