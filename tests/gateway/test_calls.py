"""Each call is measured, and goes on with the trace that its client is in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from opentelemetry.trace import SpanKind
from structlog.testing import capture_logs

from nano_inference.config import Config, TelemetryConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.calls import ObservedCalls
from nano_inference.gateway.measures import Measures
from nano_inference.telemetry import names
from nano_inference.telemetry.instruments import GATEWAY_IN_FLIGHT, HTTP_DURATION

from .fake import FakeEngine, refused
from .told import Told, ids

LIMIT_S = 20

TRACE, SPAN = "a" * 32, "b" * 16
CLIENT = f"00-{TRACE}-{SPAN}-01"
ROUTES = ("/generate", "/health", "/flush_cache")


@asynccontextmanager
async def observed(engine: FakeEngine, measures: Measures) -> AsyncIterator[httpx.AsyncClient]:
    app = ObservedCalls(make_app(engine, Config(), measures), measures, ROUTES)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        asyncio.timeout(LIMIT_S),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield client


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def http(engine: FakeEngine, told: Told) -> AsyncIterator[httpx.AsyncClient]:
    async with observed(engine, told.measures) as client:
        yield client


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
async def test_an_answer_repeats_what_its_client_calls_the_call(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path, headers={"X-Request-Id": "mine 7"})
    assert answer.headers.get_list("x-request-id") == ["mine 7"]


@pytest.mark.parametrize("given", [None, "", " ", "x" * 129, "\u00e9", "a\x01b"])
async def test_a_call_without_a_usable_name_gets_one(
    http: httpx.AsyncClient, given: str | None
) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    names_given = {
        (await http.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)
    }
    assert len(names_given) == 2
    assert all(len(name) == 32 for name in names_given)


async def test_what_fails_is_in_the_log_by_its_name(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.outputs = refused("internal_error")
    with capture_logs() as lines:
        await http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "mine"})
    (line,) = [line for line in lines if line["event"] == "http_request_failed"]
    assert (line["call_id"], line["path"]) == ("mine", "/generate")


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_stands_between_its_client_and_its_requests(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told, stream: bool
) -> None:
    headers = {"traceparent": CLIENT, "tracestate": "vendor=1"}
    body = {"text": ["a", "b"], "stream": stream}
    assert (await http.post("/generate", json=body, headers=headers)).status_code == 200
    (span,) = told.spans()
    trace_id, span_id, parent_id = ids(span)
    assert (trace_id, parent_id) == (TRACE, SPAN)
    for trace in engine.traces:
        assert trace is not None
        assert trace.traceparent == f"00-{TRACE}-{span_id}-01"
        assert trace.tracestate == "vendor=1"
    assert len(engine.traces) == 2
    assert (span.name, span.kind) == ("POST /generate", SpanKind.SERVER)
    assert span.attributes == {
        names.HTTP_METHOD: "POST",
        names.HTTP_ROUTE: "/generate",
        names.HTTP_STATUS: 200,
        names.URL_PATH: "/generate",
        names.URL_SCHEME: "http",
        names.CLIENT_ADDRESS: "127.0.0.1",
    }
    assert span.status.is_unset


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["nonsense"],
        [CLIENT.upper()],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [CLIENT + "-more"],
        [CLIENT, CLIENT],
        [f"01-{TRACE}-{SPAN}-01-" + "x" * 300],
    ],
)
async def test_without_a_valid_context_a_trace_begins(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told, given: list[str]
) -> None:
    headers = [("traceparent", each) for each in given] + [("tracestate", "vendor=1")]
    await http.post("/generate", json={"text": "a"}, headers=headers)
    (span,) = told.spans()
    trace_id, span_id, parent_id = ids(span)
    assert trace_id != TRACE
    assert parent_id == ""
    (trace,) = engine.traces
    assert trace is not None
    assert (trace.traceparent, trace.tracestate) == (f"00-{trace_id}-{span_id}-01", "")


async def test_states_of_several_headers_are_one(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    headers = [("traceparent", CLIENT), ("tracestate", "one=1"), ("tracestate", "two=2")]
    await http.post("/generate", json={"text": "a"}, headers=headers)
    (trace,) = engine.traces
    assert trace is not None
    assert trace.tracestate == "one=1,two=2"


async def test_what_the_client_does_not_record_nobody_does(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told
) -> None:
    unsampled = CLIENT[:-1] + "0"
    await http.post("/generate", json={"text": "a"}, headers={"traceparent": unsampled})
    assert told.spans() == []
    (trace,) = engine.traces
    assert trace is not None
    assert trace.traceparent == unsampled


async def test_a_trace_that_is_not_recorded_is_not_begun_again_by_others(
    engine: FakeEngine,
) -> None:
    told = Told(TelemetryConfig(trace_ratio=0.0))
    async with observed(engine, told.measures) as http:
        await http.post("/generate", json={"text": "a"})
    assert told.spans() == []
    (trace,) = engine.traces
    assert trace is not None
    assert trace.is_valid
    assert not trace.sampled


async def test_without_tracing_here_the_client_s_context_goes_on(engine: FakeEngine) -> None:
    async with observed(engine, Measures()) as http:
        await http.post("/generate", json={"text": "a"}, headers={"traceparent": CLIENT})
        await http.post("/generate", json={"text": "a"})
    assert [trace and trace.traceparent for trace in engine.traces] == [CLIENT, ""]


async def test_what_asks_for_health_begins_no_traces(http: httpx.AsyncClient, told: Told) -> None:
    await http.get("/health")
    assert told.spans() == []
    await http.get("/health", headers={"traceparent": CLIENT})
    (span,) = told.spans()
    assert (span.name, ids(span)[2]) == ("GET /health", SPAN)


async def test_paths_that_are_not_there_make_no_spans(http: httpx.AsyncClient, told: Told) -> None:
    await http.post("/nowhere", json={}, headers={"traceparent": CLIENT})
    assert told.spans() == []


@pytest.mark.parametrize(
    ("code", "status", "failed"), [("lane_failed", 500, True), ("invalid_top_p", 400, False)]
)
async def test_only_what_is_not_the_client_s_fault_is_an_error(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told, code: str, status: int, failed: bool
) -> None:
    engine.outputs = refused(code)
    await http.post("/generate", json={"text": "a"})
    (span,) = told.spans()
    assert span.attributes is not None
    assert span.attributes[names.HTTP_STATUS] == status
    assert span.status.is_unset != failed
    assert span.attributes.get(names.ERROR_TYPE) == (str(status) if failed else None)


# --- metrics ------------------------------------------------------------------------------------


async def test_calls_are_counted_by_route_and_status(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told
) -> None:
    for _ in range(2):
        await http.post("/generate", json={"text": "a"})
    await http.post("/generate", json={"text": 3})
    engine.failures["flush_cache"] = ZeroDivisionError()  # type: ignore[assignment]
    await http.post("/flush_cache")
    await http.post("/generate", json={"text": "a"}, headers={"Origin": "https://evil.example"})
    for path in ("/one", "/two"):
        await http.request("BREW", path)
    assert told.values(HTTP_DURATION) == {
        ("POST", "/generate", "200"): 2,
        ("POST", "/generate", "400"): 1,
        ("POST", "/generate", "403"): 1,
        ("POST", "/flush_cache", "500"): 1,
        ("_OTHER", "", "404"): 2,
    }


async def test_calls_that_are_under_way(
    http: httpx.AsyncClient, engine: FakeEngine, told: Told
) -> None:
    engine.outputs = lambda request: []
    calls = [asyncio.create_task(http.post("/generate", json={"text": "a"})) for _ in range(3)]
    await engine.until(lambda: len(engine.requests) == 3)
    assert told.values(GATEWAY_IN_FLIGHT) == {(): 3}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert told.values(GATEWAY_IN_FLIGHT) == {(): 0}
    assert told.values(HTTP_DURATION) == {("POST", "/generate", "499"): 3}, "nobody was answered"
