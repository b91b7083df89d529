"""OpenAI's batches; docs/batches.md."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....config import shown
from ....store.batches import ENDED, BatchState, StoredBatch
from ...batches.made import begin, cancelled, find
from ...batches.runner import BatchRunner
from ...call import Call
from ...server.http import JsonResponse, Response, field_error, read_object
from ...serving.fields import read_part, read_query
from ..routes import PolicyRoute
from .files import page
from .responses.requests import check_metadata

PATH = "/v1/batches"

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/inference/v1/generate",
    "/generate",
    "/score",
    "/rerank",
)
"""The paths that lines may call."""

_MOST_BYTES = 1 << 16
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class OutputExpiry(msgspec.Struct, frozen=True):
    """`output_expires_after`."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * 86_400)]
    anchor: Literal["created_at"] = "created_at"


class BatchBody(msgspec.Struct, frozen=True):
    """The body of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


class BatchesQuery(msgspec.Struct, frozen=True):
    """The query of the list of batches."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


def batch_routes(runner: BatchRunner) -> list[PolicyRoute]:
    """Return the endpoints."""
    store, files = runner.store, runner.files

    async def create(call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), BatchBody)
        if body.endpoint not in ENDPOINTS:
            why = f"is {shown(body.endpoint)}"
            raise field_error("endpoint", why, f"it must be one of {', '.join(ENDPOINTS)}")
        check_metadata(body.metadata or {})
        window_s = _window_s(body.completion_window)
        record = await files.find(call.tenant, body.input_file_id)
        if record.purpose != "batch":
            raise field_error(
                "input_file_id",
                f"is a file for {shown(record.purpose)}",
                "it must be one with the purpose batch",
            )
        now_s = int(time.time())
        if record.expires_s < now_s + window_s:
            raise field_error(
                "input_file_id",
                "is a file that expires before the batch",
                remedy="upload it with a later expiry, or shorten completion_window",
            )
        state = BatchState(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=call.tenant,
            endpoint=body.endpoint,
            input_file=record.id,
            model=call.named_model,
            caller=msgspec.json.encode(call.caller),
            metadata=body.metadata,
            window=body.completion_window,
            created_s=now_s,
            expires_s=now_s + window_s,
            results_ttl_s=body.output_expires_after.seconds if body.output_expires_after else 0,
        )
        await begin(runner, state)
        return JsonResponse(await _found(call.tenant, state.id))

    async def listed(call: Call) -> Response:
        query = read_query(call, BatchesQuery)
        found = await store.listed(call.tenant)
        own = [batch_object(each) for each in found if each.state.interface == "openai"]
        return JsonResponse(page(own, query.after, query.limit))

    async def one(call: Call) -> Response:
        return JsonResponse(await _found(call.tenant, call.params["batch_id"]))

    async def cancel(call: Call) -> Response:
        batch_id = call.params["batch_id"]
        await cancelled(runner, call.tenant, batch_id)
        return JsonResponse(await _found(call.tenant, batch_id))

    async def _found(tenant: str, batch_id: str) -> dict[str, Any]:
        return batch_object(await find(runner, tenant, batch_id))

    return [
        PolicyRoute(f"POST {PATH}", "generate", create),
        PolicyRoute(f"GET {PATH}", "read", listed),
        PolicyRoute(f"GET {PATH}/{{batch_id}}", "read", one),
        PolicyRoute(f"POST {PATH}/{{batch_id}}/cancel", "generate", cancel),
    ]


def batch_object(found: StoredBatch) -> dict[str, Any]:
    """Return a batch in OpenAI's form."""
    state = found.state
    times = {f"{name}_at": state.ended_s if state.status == name else None for name in ENDED}
    faults = [msgspec.to_builtins(each) for each in state.faults]
    return {
        "id": state.id,
        "object": "batch",
        "endpoint": state.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": state.input_file,
        "completion_window": state.window,
        "status": state.status,
        "output_file_id": state.output_file or None,
        "error_file_id": state.error_file or None,
        "created_at": state.created_s,
        "in_progress_at": state.began_s or None,
        "expires_at": state.expires_s,
        "finalizing_at": state.finalizing_s or None,
        "cancelling_at": state.cancelling_s or None,
        **times,
        "request_counts": {
            "total": state.total,
            "completed": found.completed,
            "failed": found.failed,
        },
        "metadata": state.metadata,
    }


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    window_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < window_s <= 30 * 86_400:
        raise field_error(
            "completion_window",
            f"is {shown(text)}",
            "it must be a time of at most 30 days, such as 24h, 90m or 7d",
        )
    return window_s
