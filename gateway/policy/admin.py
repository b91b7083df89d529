"""`/admin/…`: keys, tenants and guardrails over HTTP, for callers with the scope "admin"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from ...config import Config, RequestError
from ..http import JsonResponse, read_object
from .administration import Administration
from .policy import Policy
from .routes import PolicyRoute

_CREATED = 201


class AdminCalls:
    """The endpoints. All but reading takes a JSON object as its body."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._store = policy.store
        self._max_body_bytes = config.gateway.max_body_bytes

    @property
    def _administration(self) -> Administration:
        if self._store is None:
            raise RequestError(
                "this gateway has no keys: policy.backend is 'off'; set it to 'bus' or 'file'",
                code="unsupported",
            )
        return Administration(self._store)

    async def keys(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": await self._administration.keys()})

    async def create_key(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        return JsonResponse(await self._administration.create_key(body), _CREATED)

    async def key(self, request: Request) -> Response:
        return JsonResponse(await self._administration.key(request.path_params["key_id"]))

    async def change_key(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        key_id = request.path_params["key_id"]
        return JsonResponse(await self._administration.change_key(key_id, body))

    async def revoke_key(self, request: Request) -> Response:
        key_id = request.path_params["key_id"]
        await self._administration.revoke_key(key_id)
        return JsonResponse({"id": key_id, "object": "key", "deleted": True})

    async def tenants(self, request: Request) -> Response:
        return JsonResponse(await self._administration.tenants())

    async def set_tenant(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        tenant = request.path_params["tenant"]
        return JsonResponse(await self._administration.set_tenant(tenant, body))

    async def remove_tenant(self, request: Request) -> Response:
        tenant = request.path_params["tenant"]
        await self._administration.remove_tenant(tenant)
        return JsonResponse({"id": tenant, "object": "tenant", "deleted": True})

    async def guardrails(self, request: Request) -> Response:
        return JsonResponse(await self._administration.guardrails())

    async def set_guardrails(self, request: Request) -> Response:
        body = await read_object(request, self._max_body_bytes)
        return JsonResponse(await self._administration.set_guardrails(body))


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
