"""Errors as Ollama's clients read them."""

from __future__ import annotations

from ....config import NanoInferenceError
from ...call import Call
from ...server.http import JsonResponse, Response, error_headers, status_of

PATH = "/api/"
"""The beginning of the paths of all endpoints."""

CODE_HEADER = "X-Error-Code"
"""The header of an error's stable code; the body has the sentence alone."""

_NO_MODEL = ("unknown_model", "model_not_found")


def is_called(call: Call) -> bool:
    """Return whether a call is for this interface, even without such an endpoint."""
    return call.path.startswith(PATH)


def error_line(error: NanoInferenceError) -> dict[str, str]:
    """Return an error, as a body or as the last line of a stream."""
    # Clients look for these words.
    before = "model not found: " if error.code in _NO_MODEL else ""
    return {"error": f"{before}{error.message}"}


def respond(call: Call, error: NanoInferenceError) -> Response:
    """Return the answer for an error."""
    headers = error_headers(error) | {CODE_HEADER: error.code}
    return JsonResponse(error_line(error), status_of(error), headers)
