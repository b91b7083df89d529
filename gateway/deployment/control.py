"""Having models loaded and unloaded, which the audit log is told of."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from ...config import ConfigError, ModelConfig, RequestError
from ...pipeline.client import BusClient
from ...pipeline.models import ModelStatus
from ..policy.audit import AuditLog
from ..policy.caller import caller_of
from ..server.http import call_id_of, convert


class ModelControl:
    """Does to the models of a deployment what administrators ask for."""

    def __init__(self, engine: BusClient, audit: AuditLog | None) -> None:
        """`engine`: the client of the deployment."""
        self._engine = engine
        self._audit = audit

    async def models(self) -> list[ModelStatus]:
        """All of them. Raises BusError."""
        return await self._engine.models()

    async def add(self, request: Request, body: dict[str, Any]) -> ModelStatus:
        """A model that the deployment does not have yet; returns when it is loaded.

        Args:
            body: A `ModelConfig`.

        Raises:
            RequestError: It is none.
            NanoInferenceError: As `BusClient.load_model`.
        """
        try:
            spec = convert(body, ModelConfig)
        except ConfigError as error:
            raise RequestError(error.message, code="invalid_model") from None
        status = await self._engine.load_model(spec)
        self._tell(request, "model_added", status)
        return status

    async def load(self, request: Request, model: str) -> ModelStatus:
        """Returns when it is loaded. Raises as `BusClient.load_model`."""
        status = await self._engine.load_model(model)
        self._tell(request, "model_loaded", status)
        return status

    async def unload(
        self, request: Request, model: str, timeout_s: float | None = None
    ) -> ModelStatus:
        """Returns when its requests have ended, and its processes. Raises as
        `BusClient.unload_model`."""
        status = await self._engine.unload_model(model, timeout_s=timeout_s)
        self._tell(request, "model_unloaded", status)
        return status

    async def remove(
        self, request: Request, model: str, timeout_s: float | None = None
    ) -> ModelStatus:
        """As `unload`; the deployment does not have it any more."""
        status = await self._engine.unload_model(model, timeout_s=timeout_s, remove=True)
        self._tell(request, "model_removed", status)
        return status

    def _tell(self, request: Request, what: str, status: ModelStatus) -> None:
        if self._audit is not None:
            caller = caller_of(request)
            by = {"key_id": caller.key_id, "key_name": caller.name, "tenant": caller.tenant}
            call = {"call_id": call_id_of(request.scope)}
            now = msgspec.to_builtins(status)
            self._audit.write(what, by | call | {"changed": status.id, "now": now})
