"""What a gateway answers of all models of its deployment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...config import ModelError, NanoInferenceError
from ...store.registry import ModelState
from ..api import anthropic
from ..model_statuses import PATH, status_json, statuses_response
from ..policy.caller import Caller, caller_of
from ..policy.models import check_allowed
from ..policy.routes import PolicyRoute
from ..policy.scopes import Needed
from ..server.http import JsonResponse, answer_while_connected, convert, read_object
from ..serving.readiness import Readiness
from .control import ModelControl
from .dispatch import model_for
from .model_app import ModelApp
from .models import Models

_LLAMA_CPP: dict[ModelState, str] = {
    "ready": "loaded",
    "loading": "loading",
    "draining": "loaded",
    "unloaded": "unloaded",
    "failed": "unloaded",
}
"""States in the words of llama.cpp's server, which clients of several models know."""

_CREATED = 201

Endpoint = Callable[[Request], Awaitable[Response]]


class _Unload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the requests of a model may take that is to be unloaded; None for any time."""

    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class _Named(msgspec.Struct, frozen=True):
    """As llama.cpp's server is told of a model."""

    model: Annotated[str, Meta(min_length=1)]


class DeploymentCalls:
    """The endpoints."""

    def __init__(
        self, models: Models, control: ModelControl, readiness: Readiness, max_body_bytes: int
    ) -> None:
        self._models = models
        self._control = control
        self._readiness = readiness
        self._max_body_bytes = max_body_bytes

    # --- for everybody ------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        """All models that the caller may use, loaded or not."""
        return JsonResponse({"object": "list", "data": await self.cards(caller_of(request))})

    async def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """What is told of all models and adapters that a caller may use."""
        return [card for app in self._models.apps for card in await _cards(app, caller)]

    async def model(self, request: Request) -> Response:
        """One of them, by any of its names."""
        return JsonResponse(await self.card(request))

    async def card(self, request: Request) -> dict[str, Any]:
        """What is told of the model or adapter in a call's path."""
        name, caller = request.path_params["model"], caller_of(request)
        app = await model_for(self._models, request, name)
        check_allowed(caller, app.id)
        return _with_state(await app.interfaces.info.card(name, caller), app)

    async def health(self, request: Request) -> Response:
        """Whether some model works, or none is meant to."""
        if trouble := await self._readiness.trouble():
            raise NanoInferenceError(trouble, code="not_ready")
        return Response()

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": metadata.version("nano-inference")})

    # --- for administrators -------------------------------------------------------------------

    async def statuses(self, request: Request) -> Response:
        return statuses_response(await self._control.models())

    async def status(self, request: Request) -> Response:
        app = await self._models.find(request.path_params["model"])
        for status in await self._control.models():
            if status.id == app.id:
                return JsonResponse(status_json(status))
        raise ModelError("the model is gone", code="unknown_model")

    async def add(self, request: Request) -> Response:
        """Has one more model, and loads it."""
        body = await self._body(request)

        async def work() -> Response:
            return JsonResponse(status_json(await self._control.add(request, body)), _CREATED)

        return await answer_while_connected(request, work)

    async def load(self, request: Request) -> Response:
        await self._body(request)
        model = request.path_params["model"]

        async def work() -> Response:
            return JsonResponse(status_json(await self._control.load(request, model)))

        return await answer_while_connected(request, work)

    async def unload(self, request: Request) -> Response:
        wish, model = convert(await self._body(request), _Unload), request.path_params["model"]

        async def work() -> Response:
            status = await self._control.unload(request, model, wish.timeout_s)
            return JsonResponse(status_json(status))

        return await answer_while_connected(request, work)

    async def remove(self, request: Request) -> Response:
        wish, model = convert(await self._body(request), _Unload), request.path_params["model"]

        async def work() -> Response:
            status = await self._control.remove(request, model, wish.timeout_s)
            return JsonResponse({"id": status.id, "object": "model", "deleted": True})

        return await answer_while_connected(request, work)

    # --- as llama.cpp's server is asked ---------------------------------------------------------

    async def load_named(self, request: Request) -> Response:
        model = convert(await self._body(request), _Named).model

        async def work() -> Response:
            await self._control.load(request, model)
            return JsonResponse({"success": True})

        return await answer_while_connected(request, work)

    async def unload_named(self, request: Request) -> Response:
        model = convert(await self._body(request), _Named).model

        async def work() -> Response:
            await self._control.unload(request, model)
            return JsonResponse({"success": True})

        return await answer_while_connected(request, work)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self._max_body_bytes)


def deployment_routes(calls: DeploymentCalls) -> list[PolicyRoute]:
    """The endpoints."""

    def route(method: str, path: str, needed: Needed, endpoint: Endpoint) -> PolicyRoute:
        return PolicyRoute(path, endpoint, needed=needed, methods=[method])

    one = f"{PATH}/{{model:path}}"
    return [
        *anthropic.model_routes(calls.cards, calls.card),
        route("GET", "/v1/models", "read", calls.list_models),
        route("GET", "/models", "read", calls.list_models),
        route("GET", "/v1/models/{model:path}", "read", calls.model),
        route("GET", "/health", "nothing", calls.health),
        route("GET", "/version", "nothing", calls.version),
        route("GET", PATH, "admin", calls.statuses),
        route("POST", PATH, "admin", calls.add),
        route("POST", f"{one}/load", "admin", calls.load),
        route("POST", f"{one}/unload", "admin", calls.unload),
        route("GET", one, "admin", calls.status),
        route("DELETE", one, "admin", calls.remove),
        route("POST", "/models/load", "admin", calls.load_named),
        route("POST", "/models/unload", "admin", calls.unload_named),
    ]


async def _cards(app: ModelApp, caller: Caller) -> list[dict[str, Any]]:
    return [_with_state(card, app) for card in await app.interfaces.info.cards(caller)]


def _with_state(card: dict[str, Any], app: ModelApp) -> dict[str, Any]:
    """What is told of a model, and how it is: in our words, and in those of llama.cpp."""
    record = app.record
    status: dict[str, Any] = {"value": _LLAMA_CPP[record.state]}
    if record.state == "failed":
        status["failed"] = True
    # They are the model's own, and not its adapters'.
    aliases = () if card["parent"] else record.spec.aliases
    return card | {"aliases": aliases, "state": record.state, "status": status}
