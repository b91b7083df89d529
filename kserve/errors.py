"""Errors of a call, as they come to a client by gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from ..config import NanoInferenceError
from .keys import CODE_KEY, RETRY_KEY, STATUS_KEY

# What the statuses of other servers, and of gRPC itself, are called here.
_CODES = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request",
    grpc.StatusCode.DEADLINE_EXCEEDED: "expired",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.PERMISSION_DENIED: "insufficient_scope",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.UNAUTHENTICATED: "invalid_api_key",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.UNIMPLEMENTED: "unsupported",
}


_STATUSES: dict[int, grpc.StatusCode] = {each.value[0]: each for each in grpc.StatusCode}


class KServeError(NanoInferenceError):
    """A call failed.

    Attributes:
        code: The same as the server's, or by the status where it tells none.
        status: gRPC's.
        retry_after_s: When it is worth trying again; None when nobody said.
    """

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode,
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code or _CODES.get(status, "internal_error"))
        self.status = status
        self.retry_after_s = retry_after_s


def error_of(error: grpc.aio.AioRpcError) -> KServeError:
    """What gRPC raised, as an error of ours."""
    told = dict(_texts(error.trailing_metadata() or ()))
    return KServeError(
        error.details() or f"the call ended with {error.code().name}",
        status=error.code(),
        code=told.get(CODE_KEY, ""),
        retry_after_s=_seconds(told.get(RETRY_KEY)),
    )


def stream_error(answer: Any) -> KServeError:
    """The error that an answer of a stream is, a ModelStreamInferResponse."""
    told = answer.infer_response.parameters
    number = told[STATUS_KEY].int64_param if STATUS_KEY in told else -1
    return KServeError(
        answer.error_message,
        status=_STATUSES.get(number, grpc.StatusCode.UNKNOWN),
        code=told[CODE_KEY].string_param if CODE_KEY in told else "",
    )


def expired() -> KServeError:
    """A call's time was over before it could be sent."""
    return KServeError(
        "the call's time (budget_ns) was over before it could be sent; give it more",
        status=grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[tuple[str, str]]:
    return ((key, value) for key, value in metadata if isinstance(value, str))


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
