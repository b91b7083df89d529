"""Anthropic's batches of messages, on the store of all batches; docs/batches.md."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from ....config import RequestError, shown
from ....store.batches import ENDED, BatchState, StoredBatch
from ...batches.files import About
from ...batches.made import begin, cancelled, find
from ...batches.runner import BatchRunner
from ...call import Call
from ...server.http import JsonResponse, Response, StreamingResponse, field_error
from ..routes import PolicyRoute
from .errors import PATH as MESSAGES
from .errors import named
from .pages import paged
from .requests import check_version

PATH = f"{MESSAGES}/batches"

_WINDOW_S = 86_400
_INTERFACE = "anthropic"


class _Request(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _Body(msgspec.Struct):
    requests: list[_Request]


def batch_routes(runner: BatchRunner) -> list[PolicyRoute]:
    """Return the endpoints."""
    store, files, config = runner.store, runner.files, runner.config

    async def create(call: Call) -> Response:
        check_version(call)
        requests = _read(await call.read(config.max_file_bytes), config.max_lines)

        async def lines() -> AsyncIterator[bytes]:
            for each in requests:
                yield msgspec.json.encode(each) + b"\n"

        now_s = int(time.time())
        batch_id = f"msgbatch_{uuid.uuid4().hex}"
        about = About(f"{batch_id}.jsonl", "batch", max(config.files_ttl_s, _WINDOW_S))
        record = await files.write(call.tenant, lines(), lambda: about)
        state = BatchState(
            id=batch_id,
            tenant=call.tenant,
            interface="anthropic",
            endpoint=MESSAGES,
            input_file=record.id,
            model=call.named_model,
            caller=msgspec.json.encode(call.caller),
            created_s=now_s,
            expires_s=now_s + _WINDOW_S,
        )
        try:
            await begin(runner, state)
        except RequestError:
            await files.delete(record)
            raise
        return await answer(call, batch_id)

    async def listed(call: Call) -> Response:
        found = [batch_object(each) for each in await store.listed(call.tenant) if _is_own(each)]
        return named(call, JsonResponse(paged(found, call)))

    async def one(call: Call) -> Response:
        return await answer(call, call.params["batch_id"])

    async def cancel(call: Call) -> Response:
        batch_id = call.params["batch_id"]
        await cancelled(runner, call.tenant, batch_id, _INTERFACE)
        return await answer(call, batch_id)

    async def results(call: Call) -> Response:
        found = await find(runner, call.tenant, call.params["batch_id"], _INTERFACE)
        _check_ended(found)
        if not found.state.output_file:
            return Response(media_type="application/x-jsonl")
        record = await files.find(call.tenant, found.state.output_file)
        headers = {"X-Content-Type-Options": "nosniff"}
        kind = "application/x-jsonl"
        return StreamingResponse(files.content(record), headers=headers, media_type=kind)

    async def delete(call: Call) -> Response:
        found = await find(runner, call.tenant, call.params["batch_id"], _INTERFACE)
        _check_ended(found)
        await store.delete(call.tenant, found.state.id)
        for file_id in filter(None, (found.state.input_file, found.state.output_file)):
            if (record := await files.records.find(call.tenant, file_id)) is not None:
                await files.delete(record)
        deleted = {"id": found.state.id, "type": "message_batch_deleted"}
        return named(call, JsonResponse(deleted))

    async def answer(call: Call, batch_id: str) -> Response:
        found = await find(runner, call.tenant, batch_id, _INTERFACE)
        return named(call, JsonResponse(batch_object(found)))

    return [
        PolicyRoute(f"POST {PATH}", "generate", create),
        PolicyRoute(f"GET {PATH}", "read", listed),
        PolicyRoute(f"GET {PATH}/{{batch_id}}", "read", one),
        PolicyRoute(f"POST {PATH}/{{batch_id}}/cancel", "generate", cancel),
        PolicyRoute(f"GET {PATH}/{{batch_id}}/results", "read", results),
        PolicyRoute(f"DELETE {PATH}/{{batch_id}}", "generate", delete),
    ]


def batch_object(found: StoredBatch) -> dict[str, Any]:
    """Return a batch in Anthropic's form."""
    state, ended = found.state, found.state.status in ENDED
    counts = Counter(
        succeeded=found.completed,
        errored=found.failed,
        canceled=found.counts.cancelled,
        expired=found.counts.expired,
    )
    left = 0 if ended else state.total - counts.total()
    cancelling = state.status == "cancelling"
    return {
        "id": state.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if cancelling else "in_progress",
        "request_counts": {"processing": left, **counts},
        "created_at": _time(state.created_s),
        "expires_at": _time(state.expires_s),
        "ended_at": _time(state.ended_s),
        "cancel_initiated_at": _time(state.cancelling_s),
        "archived_at": None,
        # A path, since a proxy may have another name and scheme for this server.
        "results_url": f"{PATH}/{state.id}/results" if ended else None,
    }


def _read(body: bytes, most: int) -> list[_Request]:
    try:
        requests = msgspec.json.decode(body, type=_Body).requests
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the body can't be read: {error}",
            "it must be a JSON object with requests, each with custom_id and params",
            code="malformed",
        ) from None
    if not 0 < len(requests) <= most:
        why = f"has {len(requests)}"
        raise field_error("requests", why, f"it must have 1 to {most} (batches.max_lines)")
    seen: set[str] = set()
    for place, each in enumerate(requests):
        if each.custom_id in seen:
            raise field_error(
                f"requests[{place}].custom_id",
                f"is {shown(each.custom_id)}, as that of an earlier request",
                remedy="give each request an id of its own, by which its result is found",
            )
        seen.add(each.custom_id)
    return requests


def _is_own(found: StoredBatch) -> bool:
    return found.state.interface == _INTERFACE


def _check_ended(found: StoredBatch) -> None:
    if found.state.status not in ENDED:
        raise RequestError(
            f"batch {found.state.id} has not ended",
            remedy="cancel it first, or wait for its end",
            code="batch_running",
        )


def _time(seconds: int) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds else None
