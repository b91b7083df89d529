"""A deployment of fake models, and a gateway before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nano_inference.bus.public import GenerateRequest
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
from nano_inference.pipeline.models import ModelStatus
from nano_inference.store.registry import ModelRecord, find_model
from nano_inference.telemetry import TraceContext

from ..fake import Client, FakeBus, FakeEngine, completion, http_of, sample


class ModelEngine(FakeEngine):
    """An engine that answers with its model's name."""

    def __init__(self, whole: FakeBus, model: str) -> None:
        super().__init__()
        self.bus.store, self.bus.model = whole.store, model
        self.model = model
        self.closed = False
        self.outputs = lambda request: [completion(request, sample(text=f"by {model}"))]

    async def publish(self, request: GenerateRequest, trace: TraceContext | None = None) -> str:
        record = (await self.bus.store.models.read()).get(self.model)
        if record is None or not record.takes_requests:
            raise BusError(f"the model {self.model!r} takes none", code="model_not_loaded")
        return await super().publish(request, trace)

    async def aclose(self) -> None:
        self.closed = True


class Deployment(FakeEngine):
    """A fake client of a deployment, and of the manager of its models.

    Attributes:
        engines: The youngest engine of each model that a gateway has asked for.
        asked: The loads and unloads that were asked for.
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
        await self._put(ModelConfig(id=model, path="tiny", **spec), state)

    async def _put(self, spec: ModelConfig, state: Any) -> None:
        record = ModelRecord(spec=spec, state=state, takes_requests=state == "ready")
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

    async def _became(self, name: str, state: Any) -> ModelStatus:
        if self.failure is not None:
            raise self.failure
        records = await self.bus.store.models.read()
        try:
            spec = find_model(name, records.values())
        except RequestError as error:
            raise ModelError(error.message, code="unknown_model") from None
        await self._put(spec, state)
        return ModelStatus(id=spec.id, state=state)


SETTINGS: dict[str, Any] = {
    "gateway.max_body_bytes": 4000,
    "gateway.message_format": "off",
    "gateway.resume_grace_s": 30.0,
}


class Front:
    """A gateway before a deployment.

    Attributes:
        app: The application.
        models: The models that it knows.
    """

    def __init__(self, deployment: Deployment, config: Config | None = None) -> None:
        config = config or load_config(env={}, overrides=SETTINGS)
        self.app = DeploymentApp(deployment, config)  # type: ignore[arg-type]
        self.models = self.app.models
        self.server = HttpServer(self.app, config.gateway, on_call=self.app.on_call)

    async def seen(self) -> None:
        """Read the registry at once."""
        await self.models._read()

    @asynccontextmanager
    async def client(self, **given: Any) -> AsyncIterator[Client]:
        headers = {"Content-Type": "application/json"} | given.pop("headers", {})
        async with http_of(self.server.entrance, headers=headers, **given) as http:
            yield http


async def opened(deployment: Deployment, settings: dict[str, Any] | None = None) -> Front:
    """A gateway with these settings as well, which has read the registry."""
    front = Front(deployment, load_config(env={}, overrides=SETTINGS | (settings or {})))
    await front.seen()
    return front
