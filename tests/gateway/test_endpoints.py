"""Endpoints of the gateway as a whole: probes, metrics, the root page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nano_inference.config import BusError, GatewayConfig, PipelineConfig, TelemetryConfig
from nano_inference.gateway import endpoints
from nano_inference.gateway.server.limits import PROBES
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.server.server import HttpServer
from nano_inference.gateway.serving import lane_state as readiness_module
from nano_inference.gateway.serving.lane_state import DRAINING, Readiness
from nano_inference.store.board import StageReport
from nano_inference.telemetry import setup_metrics
from nano_inference.telemetry.instruments import QUEUE_DEPTH

from .errors import error_of
from .fake import Client, FakeEngine, app_of, http_of

WHY = "executor is starting: loading the model"


@pytest.fixture
def readiness(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Readiness:
    monkeypatch.setattr(readiness_module, "ASKED_EVERY_S", 0.0)
    return Readiness(engine.deployment)  # type: ignore[arg-type]


@pytest.fixture
async def http(
    engine: FakeEngine, readiness: Readiness, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setattr(endpoints, "ASKED_EVERY_S", 0.0)
    app = app_of(engine, readiness=readiness)
    server = HttpServer(app, GatewayConfig(max_connections=1))
    async with http_of(server.calls, engine) as client:
        yield client


async def probe(http: Client, path: str) -> tuple[int, Any]:
    answer = await http.get(path)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


def degraded(reason: str, message: str) -> tuple[int, dict[str, str]]:
    body = {"status": "degraded", "role": "unified", "reason": reason, "message": message}
    return 200, body


def not_ready(reason: str) -> tuple[int, dict[str, str]]:
    return 503, {"status": "not_ready", "role": "unified", "reason": reason}


OK = (200, {"status": "ok", "role": "unified"})
STATES = {
    "ready": (OK, (200, {"status": "ready", "role": "unified"})),
    "draining": (OK, not_ready(DRAINING)),
    "no model": (degraded("model_not_loaded", WHY), not_ready(WHY)),
    "no bus": (degraded(BusError("").code, "Redis is away"), not_ready("Redis is away")),
}
"""By state: the answers of /healthz and /readyz."""


@pytest.mark.parametrize("state", STATES)
async def test_probes(http: Client, readiness: Readiness, state: str) -> None:
    readiness.draining = state == "draining"
    http.engine.why_not = WHY if state == "no model" else ""
    if state == "no bus":
        http.engine.failures["trouble"] = BusError("Redis is away")
    assert await probe(http, "/livez") == (200, {"status": "alive"})
    assert (await probe(http, "/healthz"), await probe(http, "/readyz")) == STATES[state]


async def test_readiness_by_role(http: Client) -> None:
    why = "decode pool not ready: no process runs executor.1"
    http.engine.why_no_role["decode"] = why
    ready = (200, {"status": "ready", "role": "prefill"})
    assert await probe(http, "/readyz?role=prefill") == ready
    unready = (503, {"status": "not_ready", "role": "decode", "reason": why})
    assert await probe(http, "/readyz?role=decode") == unready
    assert await probe(http, "/readyz") == (200, {"status": "ready", "role": "unified"})
    assert await probe(http, "/readyz?role=unified") == await probe(http, "/readyz")
    http.engine.why_not = WHY
    assert (await probe(http, "/readyz?role=prefill"))[1]["reason"] == WHY
    assert error_of(await http.get("/readyz?role=x"), 400) == "invalid_request"


async def test_progress(http: Client) -> None:
    """503 while requests are in flight and neither a token nor a step comes."""
    age_s = PipelineConfig().stall_timeout_s + 1

    def report(stage: str, **load: int | float) -> StageReport:
        of_process = {"lane": "0", "incarnation": stage, "host": "h", "pid": 1, "epoch": 1}
        return StageReport(stage=stage, state="ready", load=load, **of_process)

    async def found(in_flight: int, age_s: float) -> tuple[int, Any]:
        http.engine.stage_reports = [
            report("admission", in_flight=in_flight, busy_s=9000),
            report("streaming", token_age_s=age_s),
            *map(report, ("fairness", "batching", "executor")),
        ]
        return await probe(http, "/progressz")

    assert await found(2, 0.5) == (200, {"status": "ok", "in_flight": 2, "token_age_s": 0.5})
    assert await found(0, age_s) == (200, {"status": "idle", "token_age_s": age_s})
    status, body = await found(2, age_s)
    assert (status, body["status"], body["token_age_s"]) == (503, "stalled", age_s)
    http.engine.failures["backlog"] = BusError("Redis is away")
    unknown = {"status": "unknown", "reason": "Redis is away"}
    assert await probe(http, "/progressz") == (200, unknown)


async def test_released_weights_are_known_at_once(http: Client) -> None:
    await http.post("/release_memory_occupation", json={"tags": ["weights"]})
    assert (await probe(http, "/healthz"))[1]["reason"] == "model_not_loaded"
    status, body = await probe(http, "/readyz")
    assert status == 503
    assert "weights released" in body["reason"]


@pytest.mark.parametrize("path", sorted(PROBES))
async def test_probes_are_answered_when_there_is_no_room(http: Client, path: str) -> None:
    http.engine.outputs = lambda request: []
    running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
    await http.engine.until(lambda: len(http.engine.requests) == 1)
    assert (await http.get(path)).status_code == 200
    # A client beyond the limit gets an error in OpenAI's form.
    answer = await http.get("/v1/models")
    assert error_of(answer, 429) == "overloaded"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "1"
    running.cancel()


# --- metrics and the root page --------------------------------------------------------------------

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
async def measured(engine: FakeEngine) -> AsyncIterator[Client]:
    """A client of a gateway in a process that has metrics, and no port for them."""
    metrics = setup_metrics(TelemetryConfig(), "here", without_port=True)
    metrics.record(QUEUE_DEPTH, 3)
    app = app_of(engine, measures=Measures(metrics=metrics))
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


async def test_without_metrics_the_error_names_the_setting(http: Client) -> None:
    answer = await http.get("/metrics")
    assert error_of(answer, 404) == "not_found"
    assert "gateway.metrics" in answer.json()["error"]["message"]


async def test_the_root_page_names_the_endpoints(http: Client) -> None:
    answer = await http.get("/")
    assert (answer.status_code, answer.text.count("\n")) == (200, 1)
    for word in ("nano-inference", "/v1", "/metrics", "docs/"):
        assert word in answer.text


async def test_a_browser_at_the_root_is_sent_to_the_console(http: Client) -> None:
    answer = await http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["location"]) == (307, "console/")
