"""A deployment of models that are none, and a gateway before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import (
    BusError,
    Config,
    ModelConfig,
    ModelError,
    RequestError,
    load_config,
)
from nano_inference.gateway.deployment.app import DeploymentApp
from nano_inference.gateway.server.server import HttpServer
from nano_inference.gateway.serving.measures import Measures
from nano_inference.pipeline.models import ModelStatus
from nano_inference.store.registry import ModelRecord, find_model
from nano_inference.telemetry import TraceContext

from ..fake import FakeBus, FakeEngine, completion, http_of, sample


class ModelBus(FakeBus):
    """The bus of one model, with the deployment's store."""

    def __init__(self, whole: FakeBus | None = None, model: str = "") -> None:
        super().__init__()
        self.model = model
        if whole is not None:
            self.store = whole.store


class ModelEngine(FakeEngine):
    """Says which model it is."""

    def __init__(self, whole: FakeBus, model: str) -> None:
        super().__init__()
        self.bus = ModelBus(whole, model)
        self._whole = whole
        self.model = model
        self.closed = False
        self.outputs = self._said

    def _said(self, request: GenerateRequest) -> list[Output]:
        return [completion(request, sample(text=f"by {self.model}"))]

    async def publish(self, request: GenerateRequest, trace: TraceContext | None = None) -> str:
        record = (await self._whole.store.models.read()).get(self.model)
        if record is None or not record.takes_requests:
            raise BusError(f"the model {self.model!r} takes none", code="model_not_loaded")
        return await super().publish(request, trace)

    async def aclose(self) -> None:
        self.closed = True


class Deployment(FakeEngine):
    """A fake client of a deployment, and of the manager of its models.

    Attributes:
        engines: Of all models that a gateway has asked for, the youngest of each.
        asked: What was to be done to models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engines: dict[str, ModelEngine] = {}
        self.asked: list[tuple[str, Any]] = []
        self.failure: BusError | ModelError | None = None

    def of_model(self, model: str) -> ModelEngine:
        self.engines[model] = ModelEngine(self.bus, model)
        return self.engines[model]

    async def put(self, model: str, state: str = "ready", **spec: Any) -> None:
        record = ModelRecord(
            spec=ModelConfig(id=model, path="tiny", **spec),
            state=state,  # type: ignore[arg-type]
            takes_requests=state == "ready",
        )
        await self.bus.store.models.put(record)

    async def models(self) -> list[ModelStatus]:
        records = (await self.bus.store.models.read()).values()
        return [ModelStatus(id=each.spec.id, state=each.state) for each in records]

    async def load_model(self, model: str | ModelConfig) -> ModelStatus:
        self.asked.append(("load", model))
        if isinstance(model, ModelConfig):
            await self.bus.store.models.put(ModelRecord(spec=model))
        return await self._became(model if isinstance(model, str) else model.id, "ready")

    async def unload_model(
        self, model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ModelStatus:
        self.asked.append(("remove" if remove else "unload", model))
        status = await self._became(model, "unloaded")
        if remove:
            await self.bus.store.models.remove(status.id)
        return status

    async def _became(self, name: str, state: str) -> ModelStatus:
        if self.failure is not None:
            raise self.failure
        records = await self.bus.store.models.read()
        try:
            spec = find_model(name, records.values())
        except RequestError as error:
            raise ModelError(error.message, code="unknown_model") from None
        record = ModelRecord(spec=spec, state=state, takes_requests=state == "ready")  # type: ignore[arg-type]
        await self.bus.store.models.put(record)
        return ModelStatus(id=spec.id, state=record.state)


SETTINGS: dict[str, Any] = {
    "gateway.max_body_bytes": 4000,
    "gateway.message_format": "off",
    "gateway.resume_grace_s": 30.0,
}


class Front:
    """A gateway before a deployment.

    Attributes:
        app: What answers.
        models: Those that it knows.
    """

    def __init__(
        self, deployment: Deployment, config: Config | None = None, measures: Measures | None = None
    ) -> None:
        config = config or load_config(env={}, overrides=SETTINGS)
        self.app = DeploymentApp(deployment, config, measures)  # type: ignore[arg-type]
        self.models = self.app.models
        audit = self.app.policy.audit
        self.server = HttpServer(self.app, config.gateway, measures, audit)

    async def seen(self) -> None:
        """Read the registry at once."""
        await self.models._read()

    @asynccontextmanager
    async def client(self, **given: Any) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Content-Type": "application/json"} | given.pop("headers", {})
        async with http_of(self.server.entrance, headers=headers, **given) as http:
            yield http
