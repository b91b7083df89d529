"""`/admin/…`: keys, tenants and guardrails over HTTP, for callers with the scope "admin"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ...config import Config, RequestError
from ..server.http import JsonResponse, call_id_of, read_object
from .administration import Administration, Shown
from .caller import caller_of
from .policy import Policy
from .routes import PolicyRoute

_CREATED = 201


class AdminCalls:
    """The endpoints. All but reading takes a JSON object as its body."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._store = policy.store
        self._audit = policy.audit
        self._max_body_bytes = config.gateway.max_body_bytes

    def _administration(self, request: Request) -> Administration:
        if self._store is None:
            raise RequestError(
                "this gateway has no keys: policy.backend is 'off'; set it to 'bus' or 'file'",
                code="unsupported",
            )
        return Administration(self._store, partial(self._tell, request))

    def _tell(self, request: Request, what: str, of: str, now: Shown) -> None:
        if self._audit is not None:
            caller = caller_of(request)
            by = {"key_id": caller.key_id, "key_name": caller.name, "tenant": caller.tenant}
            call = {"call_id": call_id_of(request.scope)}
            self._audit.write(what, by | call | {"changed": of, "now": now})

    async def keys(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": await self._administration(request).keys()})

    async def create_key(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        return JsonResponse(await self._administration(request).create_key(body), _CREATED)

    async def key(self, request: Request) -> Response:
        return JsonResponse(await self._administration(request).key(request.path_params["key_id"]))

    async def change_key(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        key_id = request.path_params["key_id"]
        return JsonResponse(await self._administration(request).change_key(key_id, body))

    async def revoke_key(self, request: Request) -> Response:
        key_id = request.path_params["key_id"]
        await self._administration(request).revoke_key(key_id)
        return JsonResponse({"id": key_id, "object": "key", "deleted": True})

    async def tenants(self, request: Request) -> Response:
        return JsonResponse(await self._administration(request).tenants())

    async def set_tenant(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        tenant = request.path_params["tenant"]
        return JsonResponse(await self._administration(request).set_tenant(tenant, body))

    async def remove_tenant(self, request: Request) -> Response:
        tenant = request.path_params["tenant"]
        await self._administration(request).remove_tenant(tenant)
        return JsonResponse({"id": tenant, "object": "tenant", "deleted": True})

    async def guardrails(self, request: Request) -> Response:
        return JsonResponse(await self._administration(request).guardrails())

    async def set_guardrails(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        return JsonResponse(await self._administration(request).set_guardrails(body))


def admin_routes(policy: Policy, config: Config) -> list[PolicyRoute]:
    """The endpoints."""
    calls = AdminCalls(policy, config)

    def route(
        method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> PolicyRoute:
        return PolicyRoute(f"/admin/{path}", endpoint, needed="admin", methods=[method])

    return [
        route("GET", "keys", calls.keys),
        route("POST", "keys", calls.create_key),
        route("GET", "keys/{key_id}", calls.key),
        route("PATCH", "keys/{key_id}", calls.change_key),
        route("DELETE", "keys/{key_id}", calls.revoke_key),
        route("GET", "tenants", calls.tenants),
        route("PUT", "tenants/{tenant:path}", calls.set_tenant),
        route("DELETE", "tenants/{tenant:path}", calls.remove_tenant),
        route("GET", "guardrails", calls.guardrails),
        route("PUT", "guardrails", calls.set_guardrails),
    ]
