"""`/metrics` on the gateway's own port."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from nano_inference.config import Config, TelemetryConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving.measures import Measures
from nano_inference.telemetry import setup_metrics
from nano_inference.telemetry.instruments import QUEUE_DEPTH

from .errors import error_of
from .fake import FakeEngine, http_of

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
async def measured(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in a process that has metrics, and no port for them."""
    metrics = setup_metrics(TelemetryConfig(), "here", without_port=True)
    metrics.record(QUEUE_DEPTH, 3)
    app = make_app(engine, Config(), Measures(metrics=metrics))  # type: ignore[arg-type]
    async with http_of(app) as client:
        yield client
    metrics.shutdown()


async def test_metrics_have_the_format_that_is_accepted(measured: httpx.AsyncClient) -> None:
    plain = await measured.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert "\nnano_queue_depth 3.0\n" in plain.text
    assert not plain.text.endswith("# EOF\n")
    newer = await measured.get("/metrics", headers={"Accept": OPENMETRICS})
    assert newer.headers["content-type"].startswith("application/openmetrics-text; version=")
    assert newer.text.endswith("# EOF\n")


async def test_head_of_metrics_is_answered(measured: httpx.AsyncClient) -> None:
    head = await measured.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")


async def test_without_metrics_the_error_names_the_setting(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert error_of(answer, 404) == "not_found"
    assert "gateway.metrics" in answer.json()["error"]["message"]
