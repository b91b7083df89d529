"""Endpoints of the dead letters, as `nano-inference dlq` has them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..bus.dead_letters import DeadLetter
from ..pipeline.client import BusClient
from ..pipeline.operations import dead_letters, drop_dead_letters, retry_dead_letters
from .policy.audit import AuditLog, audit_change
from .policy.chain import PolicyRoute
from .server.http import JsonResponse

PATH = "/admin/dead_letters"

_SHOWN = 2000
"""Characters of a prompt."""


def dead_letter_routes(engine: BusClient, audit: AuditLog | None) -> list[PolicyRoute]:
    """Return the endpoints. `engine`: the client of the gateway or of the whole deployment."""

    async def letters(request: Request) -> Response:
        found = [_json(each) for each in await dead_letters(engine)]
        return JsonResponse({"object": "list", "data": found})

    async def retry(request: Request) -> Response:
        letter_id: str = request.path_params["letter_id"]
        request_id = (await retry_dead_letters(engine, [letter_id]))[letter_id]
        audit_change(audit, request, "dead_letter_retried", letter_id, {"id": request_id})
        return JsonResponse({"id": letter_id, "request_id": request_id})

    async def drop(request: Request) -> Response:
        letter_id: str = request.path_params["letter_id"]
        await drop_dead_letters(engine, [letter_id])
        audit_change(audit, request, "dead_letter_dropped", letter_id, {})
        return JsonResponse({"id": letter_id, "object": "dead_letter", "deleted": True})

    return [
        PolicyRoute(f"GET {PATH}", "admin", letters),
        PolicyRoute(f"POST {PATH}/{{letter_id}}/retry", "admin", retry),
        PolicyRoute(f"DELETE {PATH}/{{letter_id}}", "admin", drop),
    ]


def _json(letter: DeadLetter) -> dict[str, Any]:
    request = letter.request
    prompt = request.prompt or "\n".join(each.text for each in request.messages or ())
    return {
        "id": letter.letter_id,
        "object": "dead_letter",
        "request_id": request.request_id,
        "model": letter.model or request.model,
        "tenant": request.tenant,
        "prompt": prompt[:_SHOWN],
        "prompt_tokens": len(request.prompt_token_ids or ()),
        "deaths": letter.deaths,
        "died_ns": letter.died_ns,
        "error": msgspec.to_builtins(letter.error),
    }
