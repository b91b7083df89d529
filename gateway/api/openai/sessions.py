"""Calls about the KV of a conversation between two turns; docs/kv-sessions.md."""

from __future__ import annotations

import msgspec

from ...call import Call
from ...server.http import JsonResponse, Response, field_error, read_object
from ...serving.fields import read_part, read_query
from ...serving.services import Services
from .bodies import SessionBody

_MOST_BYTES = 1 << 12


class FinishQuery(msgspec.Struct, frozen=True):
    """The query of `/finish_session`."""

    session_id: str = ""


class SessionCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._client = services.client
        self._served = services.served

    async def change(self, call: Call) -> Response:
        """Pin, release, demote or prefetch the KV of a session of the caller's tenant."""
        body = read_part(await read_object(call, _MOST_BYTES), SessionBody)
        await self._served.check(body.model, call.caller)
        if body.action is None:
            raise field_error("action", "is missing; give what is to be done with the KV")
        session = call.params["session"]
        result = await self._client.kv_session(
            session, body.action, ttl_s=body.ttl_s, tenant=call.tenant
        )
        answer = {"id": session, "object": "kv_session", **msgspec.to_builtins(result)}
        return JsonResponse(answer)

    async def finish(self, call: Call) -> Response:
        """Release the KV of a session that has ended, as at a router of vLLM's. A session that
        has none is no error."""
        session = read_query(call, FinishQuery).session_id
        if not session:
            raise field_error("session_id", "is missing; give the id of X-Session-ID")
        await self._client.kv_session(session, "release", ttl_s=None, tenant=call.tenant)
        return JsonResponse({"status": "ok"})
