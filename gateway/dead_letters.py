"""Endpoints of the dead letters, as `nano-inference dlq` has them."""

from __future__ import annotations

from typing import Any

import msgspec

from ..bus.dead_letters import DeadLetter
from ..pipeline.client import BusClient
from ..pipeline.operations import dead_letters, drop_dead_letters, retry_dead_letters
from .api.routes import PolicyRoute
from .call import Call
from .policy.audit import AuditLog, audit_change
from .server.http import JsonResponse, Response

PATH = "/admin/dead_letters"

_SHOWN = 2000
"""Characters of a prompt."""


def dead_letter_routes(client: BusClient, audit: AuditLog | None) -> list[PolicyRoute]:
    """Return the endpoints. `client`: the client of the gateway or of the whole deployment."""

    async def letters(call: Call) -> Response:
        found = [_json(each) for each in await dead_letters(client)]
        return JsonResponse({"object": "list", "data": found})

    async def retry(call: Call) -> Response:
        letter_id: str = call.params["letter_id"]
        request_id = (await retry_dead_letters(client, [letter_id]))[letter_id]
        audit_change(audit, call, "dead_letter_retried", letter_id, {"id": request_id})
        return JsonResponse({"id": letter_id, "request_id": request_id})

    async def drop(call: Call) -> Response:
        letter_id: str = call.params["letter_id"]
        await drop_dead_letters(client, [letter_id])
        audit_change(audit, call, "dead_letter_dropped", letter_id, {})
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
