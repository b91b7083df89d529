"""How models are, for administrators: `GET /admin/models`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..config import ModelError, RequestError, shown
from ..pipeline.client import BusClient
from ..pipeline.models import ModelStatus
from .policy.routes import PolicyRoute
from .server.http import JsonResponse

PATH = "/admin/models"
NO_LOADING = "there is one model here, which stays; name several in the setting models"


def status_json(status: ModelStatus) -> dict[str, Any]:
    """One model, as JSON."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    return {"object": "model.status"} | found


def statuses_response(statuses: list[ModelStatus]) -> Response:
    """All models."""
    return JsonResponse({"object": "list", "data": [status_json(each) for each in statuses]})


def single_model_routes(engine: BusClient) -> list[PolicyRoute]:
    """The endpoints of a server of one model, which can't be loaded or unloaded."""

    async def statuses(request: Request) -> Response:
        return statuses_response(await engine.models())

    async def status(request: Request) -> Response:
        name = request.path_params["model"]
        for each in await engine.models():
            if name in (each.id, *each.aliases):
                return JsonResponse(status_json(each))
        raise ModelError(f"there is no model {shown(name)} here", code="unknown_model")

    async def refuse(request: Request) -> Response:
        raise RequestError(NO_LOADING, code="unsupported")

    one = f"{PATH}/{{model:path}}"
    return [
        PolicyRoute(PATH, statuses, needed="admin", methods=["GET"]),
        PolicyRoute(one, status, needed="admin", methods=["GET"]),
        PolicyRoute(PATH, refuse, needed="admin", methods=["POST"]),
        PolicyRoute(one, refuse, needed="admin", methods=["POST", "DELETE"]),
    ]
