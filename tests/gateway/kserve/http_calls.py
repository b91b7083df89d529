"""KServe over HTTP with models that do little: by the application alone, or behind a port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from nano_inference.config import load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.kserve.served import ServedModel
from nano_inference.gateway.readiness import Readiness
from nano_inference.telemetry import Metrics, Tracing

from ..fake import FakeEngine

JSON = {"Content-Type": "application/json"}
LENGTH = "Inference-Header-Content-Length"


class Engine(FakeEngine):
    """As a gateway wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.tracing = Tracing()
        self.metrics = Metrics()


@asynccontextmanager
async def asking(
    *models: ServedModel,
    engine: FakeEngine | None = None,
    readiness: Readiness | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an application that serves some models besides; `settings` are the gateway's."""
    overrides = {f"gateway.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides)
    app = make_app(engine or Engine(), config, readiness=readiness)  # type: ignore[arg-type]
    for model in models:
        app.state.kserve.service.add(model)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    app.state.kserve.regions.close()


@asynccontextmanager
async def listening(*models: ServedModel, **settings: Any) -> AsyncIterator[str]:
    """Has a gateway serve some models; gives its place as Triton's clients take it."""
    overrides = {"gateway.port": 0} | {f"gateway.{name}": value for name, value in settings.items()}
    config = load_config(env={}, overrides=overrides)
    async with Gateway(Engine(), config) as gateway:  # type: ignore[arg-type]
        for model in models:
            gateway.kserve.service.add(model)
        yield f"127.0.0.1:{gateway.port}"


def failed(answer: httpx.Response, status: int) -> str:
    """The stable code of an answer that has an error."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert list(told) == ["error"]
    assert isinstance(told["error"], str)
    return answer.headers["X-Error-Code"]
