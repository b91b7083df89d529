"""Endpoints about all models of a deployment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...config import ConfigError, ModelConfig, NanoInferenceError, RequestError
from ...pipeline.client import BusClient
from ...pipeline.models import ModelStatus
from ...store.registry import ModelState
from ..api import anthropic, ollama
from ..api.openai.catalog import models_response
from ..api.routes import PolicyRoute
from ..call import Call
from ..caller import Caller, check_allowed
from ..endpoints import MODEL_PATH, MODELS_PATH, status_json, status_routes
from ..policy.audit import AuditLog, audit_change
from ..server.http import JsonResponse, Response, connected, convert, read_object
from ..serving.lane_state import Readiness
from .dispatch import model_for
from .models import ModelApp, Models

_LLAMA_CPP: dict[ModelState, str] = {
    "ready": "loaded",
    "loading": "loading",
    "draining": "loaded",
    "unloaded": "unloaded",
    "failed": "unloaded",
}
"""Model states in llama.cpp's words, which clients of several models read."""


class _Unload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s`: how long the model's requests may take; None for any time."""

    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class _NamedModel(msgspec.Struct, frozen=True):
    """The body of llama.cpp's `/models/load` and `/models/unload`."""

    model: Annotated[str, Meta(min_length=1)]


class ModelControl:
    """Loads and unloads models, and writes that to the audit log.

    Methods return when the model is loaded, or its requests and processes have ended. They raise as
    those of `BusClient`.
    """

    def __init__(self, client: BusClient, audit: AuditLog | None) -> None:
        """`client`: the client of the deployment."""
        self._client = client
        self._audit = audit

    async def add(self, call: Call, body: dict[str, Any]) -> ModelStatus:
        """Add a model, given as a `ModelConfig`, and load it.

        Raises:
            RequestError: invalid_model.
        """
        try:
            spec = convert(body, ModelConfig)
        except ConfigError as error:
            raise RequestError(error.message, code="invalid_model") from None
        return await self._changed(call, "model_added", self._client.load_model(spec))

    async def load(self, call: Call, model: str) -> ModelStatus:
        return await self._changed(call, "model_loaded", self._client.load_model(model))

    async def unload(
        self, call: Call, model: str, timeout_s: float | None = None, *, remove: bool = False
    ) -> ModelStatus:
        """Unload a model; with `remove` take it out of the deployment."""
        event = "model_removed" if remove else "model_unloaded"
        work = self._client.unload_model(model, timeout_s=timeout_s, remove=remove)
        return await self._changed(call, event, work)

    async def _changed(self, call: Call, event: str, work: Awaitable[ModelStatus]) -> ModelStatus:
        status = await work
        audit_change(self._audit, call, event, status.id, msgspec.to_builtins(status))
        return status


class OllamaModels:
    """Lists, loads and unloads models by Ollama's calls, with its names."""

    def __init__(self, models: Models, control: ModelControl) -> None:
        self._models = models
        self._control = control

    async def entries(self, caller: Caller) -> list[ollama.Entry]:
        """Return the entries of all models and adapters that a caller may use."""
        found = [await app.interfaces.ollama.entries(caller) for app in self._models.apps]
        return [entry for entries in found for entry in entries]

    async def load(self, call: Call, name: str) -> None:
        """Load a model, unless it takes requests."""
        app = await self._find(call, name)
        if app.trouble():
            await self._control.load(call, app.id)

    async def unload(self, call: Call, name: str, *, remove: bool = False) -> None:
        """Unload a model; with `remove` take it out of the deployment."""
        app = await self._find(call, name)
        await self._control.unload(call, app.id, remove=remove)

    async def _find(self, call: Call, name: str) -> ModelApp:
        app = await model_for(self._models, call, ollama.untagged(name, self._models.names()))
        check_allowed(call.caller, app.id)
        return app


def deployment_routes(
    client: BusClient,
    models: Models,
    control: ModelControl,
    of_ollama: OllamaModels,
    readiness: Readiness,
    max_body_bytes: int,
) -> list[PolicyRoute]:
    """Return the endpoints."""

    async def cards(caller: Caller) -> list[dict[str, Any]]:
        """The cards of all models and adapters that a caller may use, loaded or not."""
        return [
            _with_state(card, app)
            for app in models.apps
            for card in await app.interfaces.info.cards(caller)
        ]

    async def card(call: Call) -> dict[str, Any]:
        """The card of the model or adapter in a call's path."""
        name, caller = call.params["model"], call.caller
        app = await model_for(models, call, name)
        check_allowed(caller, app.id)
        return _with_state(await app.interfaces.info.card(name, caller), app)

    async def list_models(call: Call) -> Response:
        return models_response(call, await cards(call.caller))

    async def model(call: Call) -> Response:
        return JsonResponse(await card(call))

    async def id_of(name: str) -> str:
        return (await models.find(name)).id

    async def health(call: Call) -> Response:
        """Whether a model works, or none is meant to."""
        if trouble := await readiness.trouble():
            raise NanoInferenceError(trouble, code="not_ready")
        return Response()

    async def version(call: Call) -> Response:
        return JsonResponse({"version": metadata.version("nano-inference")})

    return [
        *anthropic.model_routes(cards, card),
        *ollama.model_routes(of_ollama, "admin"),
        PolicyRoute("GET /v1/models", "read", list_models),
        PolicyRoute("GET /models", "read", list_models),
        PolicyRoute("GET /v1/models/{model:path}", "read", model),
        PolicyRoute("GET /health", "nothing", health),
        PolicyRoute("GET /version", "nothing", version),
        *status_routes(client, id_of),
        *_change_routes(control, max_body_bytes),
    ]


def _change_routes(control: ModelControl, max_body_bytes: int) -> list[PolicyRoute]:
    def change(
        route: str,
        work: Callable[[Call, dict[str, Any]], Awaitable[ModelStatus]],
        answer: Callable[[ModelStatus], dict[str, Any]] = status_json,
        status_code: int = 200,
    ) -> PolicyRoute:
        """Route to a change, which is cancelled when the client disconnects."""

        async def endpoint(call: Call) -> Response:
            body = await read_object(call, max_body_bytes)
            async with connected(call.cancelled):
                return JsonResponse(answer(await work(call, body)), status_code)

        return PolicyRoute(route, "admin", endpoint)

    async def load(call: Call, body: dict[str, Any]) -> ModelStatus:
        return await control.load(call, call.params["model"])

    async def unload(call: Call, body: dict[str, Any]) -> ModelStatus:
        timeout_s = convert(body, _Unload).timeout_s
        return await control.unload(
            call, call.params["model"], timeout_s, remove=call.method == "DELETE"
        )

    async def load_named(call: Call, body: dict[str, Any]) -> ModelStatus:
        return await control.load(call, convert(body, _NamedModel).model)

    async def unload_named(call: Call, body: dict[str, Any]) -> ModelStatus:
        return await control.unload(call, convert(body, _NamedModel).model)

    def deleted(status: ModelStatus) -> dict[str, Any]:
        return {"id": status.id, "object": "model", "deleted": True}

    def success(status: ModelStatus) -> dict[str, Any]:
        return {"success": True}

    return [
        change(f"POST {MODELS_PATH}", control.add, status_code=201),
        change(f"POST {MODEL_PATH}/load", load),
        change(f"POST {MODEL_PATH}/unload", unload),
        change(f"DELETE {MODEL_PATH}", unload, deleted),
        change("POST /models/load", load_named, success),
        change("POST /models/unload", unload_named, success),
    ]


def _with_state(card: dict[str, Any], app: ModelApp) -> dict[str, Any]:
    """Return a model's card with its state, in this project's words and in llama.cpp's."""
    record = app.record
    status: dict[str, Any] = {"value": _LLAMA_CPP[record.state]}
    if record.state == "failed":
        status["failed"] = True
    # Aliases are the model's own, not its adapters'.
    aliases = () if card["parent"] else record.spec.aliases
    return card | {"aliases": aliases, "state": record.state, "status": status}
