"""Errors as gRPC says them: a code of its own, a sentence, and the stable code in the trailers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from grpc import StatusCode

from ....config import NanoInferenceError
from ....kserve.keys import CODE_KEY
from ...server.http import error_headers, status_of

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

# It travels as a header, of which clients take 8 KiB, and each byte may become three.
_MOST_CHARACTERS = 600


class Failure(NamedTuple):
    """An error on its way to a client.

    Attributes:
        error: What it is.
        status: As over HTTP.
        code: gRPC's.
        details: Its sentence, as far as a trailer holds it.
    """

    error: NanoInferenceError
    status: int
    code: StatusCode
    details: str

    @property
    def number(self) -> int:
        """Of gRPC's code."""
        number: int = self.code.value[0]
        return number

    def trailers(self) -> Mapping[str, str]:
        """What it says to programs."""
        told = {name.lower(): value for name, value in error_headers(self.error).items()}
        return {CODE_KEY: self.error.code} | told


def failure_of(error: NanoInferenceError) -> Failure:
    """An error as gRPC says it."""
    status = status_of(error)
    if error.code == "unsupported":
        code = StatusCode.UNIMPLEMENTED
    else:
        other = StatusCode.INTERNAL if status >= 500 else StatusCode.INVALID_ARGUMENT
        code = _CODES.get(status, other)
    details = error.message
    if len(details) > _MOST_CHARACTERS:
        details = f"{details[:_MOST_CHARACTERS]}..."
    return Failure(error, status, code, details)
