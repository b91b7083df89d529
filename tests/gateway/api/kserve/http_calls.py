"""KServe over HTTP with models that do little: by the application alone, or behind a port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np

from nano_inference.config import load_config
from nano_inference.gateway.api.kserve.served import ServedModel
from nano_inference.gateway.app import make_app
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.serving.lane_state import Readiness
from nano_inference.kserve.http_codec import decode_http_response, encode_http_request
from nano_inference.kserve.tensors import DATATYPES, DTYPES, InferResponse, NamedTensor
from nano_inference.telemetry import Metrics, Tracing

from ...fake import FakeEngine

JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
LENGTH = "Inference-Header-Content-Length"
INT8 = {"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}
"""An input of `Echo`, as JSON."""


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
        app.kserve.service.add(model)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    app.kserve.regions.close()


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


def of_each() -> list[NamedTensor]:
    """A tensor of each datatype."""
    numbers = [np.array([1, 0, 1]).astype(DTYPES[each]) for each in DATATYPES if each != "BYTES"]
    words = np.array([b"", b"\x00\xff", "zwölf".encode()], dtype=np.object_)
    named = [each for each in DATATYPES if each != "BYTES"]
    return [
        *map(NamedTensor, named, numbers),
        NamedTensor("BYTES", words),
    ]


async def infer(
    http: httpx.AsyncClient, tensors: list[NamedTensor], model: str = "echo", **more: Any
) -> httpx.Response:
    """Calls a model with bytes behind the JSON; `more` goes to the codec, but for headers."""
    headers = more.pop("headers", {})
    parts, length = encode_http_request(tensors, **more)
    if length is not None:
        headers = {LENGTH: str(length)} | headers
    body = b"".join(parts)
    return await http.post(f"/v2/models/{model}/infer", content=body, headers=BYTES | headers)


def read(answer: httpx.Response) -> InferResponse:
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(LENGTH)
    return decode_http_response(answer.content, None if length is None else int(length))
