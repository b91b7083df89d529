"""Errors as vLLM's control plane has them."""

from __future__ import annotations

from http import HTTPStatus

from ....config import NanoInferenceError
from ...call import Call
from ...server.http import JsonResponse, Response, error_headers, status_of

PATHS = frozenset(
    (
        *("/pause", "/resume", "/is_paused", "/abort_requests", "/get_world_size", "/load"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/init_broadcaster"),
        "/collective_rpc",
        *("/start_weight_update", "/start_draft_weight_update", "/update_weights"),
        *("/finish_weight_update", "/weight_info", "/weight_checker"),
        *("/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    )
)
"""Those of the endpoints; `/server_info`, `/update_weight_version` and `/load_lora_adapter` are
SGLang's too, and have its errors."""

CODE_HEADER = "X-Error-Code"
"""The header of an error's stable code; in vLLM's body the code is the HTTP status."""

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


def is_called(call: Call) -> bool:
    """Return whether a call is for this interface."""
    return call.path in PATHS


def respond(call: Call, error: NanoInferenceError) -> Response:
    """Return the answer for an error."""
    status = status_of(error)
    content = {
        "message": error.message,
        "type": _TYPES.get(status) or HTTPStatus(status).phrase,
        "param": error.param,
        "code": status,
    }
    return JsonResponse(
        {"error": content}, status, error_headers(error) | {CODE_HEADER: error.code}
    )
