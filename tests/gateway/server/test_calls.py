"""Observation of calls: trace, metrics, access log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from opentelemetry.trace import SpanKind
from starlette.routing import Route
from structlog.testing import capture_logs

from nano_inference.config import GatewayConfig, TelemetryConfig
from nano_inference.gateway.server.callers import only_known_callers
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.gateway.server.measures import Measures
from nano_inference.telemetry import TraceContext, names, setup_logging
from nano_inference.telemetry.instruments import (
    GATEWAY_IN_FLIGHT,
    HTTP_DURATION,
    MODEL_CALL_DURATION,
    OPERATION_DURATION,
)

from ..fake import Client, FakeEngine, app_of, chunk, http_of, refused
from ..recorded import Recorded, ids

TRACE, SPAN = "a" * 32, "b" * 16
CLIENT = f"00-{TRACE}-{SPAN}-01"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKED = {
    "/generate": {"text": ["a", "b"]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/chat/completions": CHAT,
}
ROUTES = (*ASKED, "/health", "/flush_cache", "/v2/models/{model:path}/generate")


@asynccontextmanager
async def observed(
    engine: FakeEngine, measures: Measures, *, access_log: bool = False
) -> AsyncIterator[Client]:
    app = only_known_callers(app_of(engine, measures=measures), GatewayConfig(), measures)
    app = ObservedCalls(app, measures, ROUTES, access_log=access_log)
    async with http_of(app, engine, raise_app_exceptions=False) as client:
        yield client


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
async def http(engine: FakeEngine, recorded: Recorded) -> AsyncIterator[Client]:
    async with observed(engine, recorded.measures) as client:
        yield client


def trace_of(engine: FakeEngine) -> TraceContext:
    """The trace of the only request."""
    (trace,) = engine.traces
    return trace


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
async def test_an_answer_repeats_the_client_s_call_id(http: Client, path: str) -> None:
    answer = await http.get(path, headers={"X-Request-Id": "mine 7"})
    assert answer.headers.get_list("x-request-id") == ["mine 7"]


@pytest.mark.parametrize("given", [None, "", " ", "x" * 129, "\u00e9", "a\x01b"])
async def test_a_call_without_a_usable_id_gets_one(http: Client, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    answers = [await http.get("/health", headers=headers) for _ in range(2)]
    first, second = (answer.headers["x-request-id"] for answer in answers)
    assert first != second
    assert len(first) == len(second) == 32


async def test_a_failure_is_logged_with_its_call_id(http: Client) -> None:
    http.engine.outputs = refused("internal_error")
    with capture_logs() as lines:
        await http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "mine"})
    (line,) = [line for line in lines if line["event"] == "http_request_failed"]
    assert (line["call_id"], line["path"]) == ("mine", "/generate")


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_a_call_s_span_is_between_its_client_and_its_requests(
    http: Client, recorded: Recorded, path: str, stream: bool
) -> None:
    headers = {"traceparent": CLIENT, "tracestate": "vendor=1"}
    body = ASKED[path] | {"stream": stream}
    assert (await http.post(path, json=body, headers=headers)).status_code == 200
    (span,) = recorded.spans()
    trace_id, span_id, parent_id = ids(span)
    assert (trace_id, parent_id) == (TRACE, SPAN)
    for trace in http.engine.traces:
        assert trace.traceparent == f"00-{TRACE}-{span_id}-01"
        assert trace.tracestate == "vendor=1"
    assert len(http.engine.traces) == (1 if body.get("messages") else 2)
    operation = "chat" if body.get("messages") else "text_completion"
    assert (span.name, span.kind) == (f"{operation} tiny", SpanKind.SERVER)
    of_request = {each: value for each, value in span.attributes.items() if "gen_ai." in each}
    assert of_request[names.OPERATION] == operation
    assert span.attributes == of_request | {
        names.HTTP_METHOD: "POST",
        names.HTTP_ROUTE: path,
        names.HTTP_STATUS: 200,
        names.URL_PATH: path,
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
    http: Client, recorded: Recorded, given: list[str]
) -> None:
    headers = [("traceparent", each) for each in given] + [("tracestate", "vendor=1")]
    await http.post("/generate", json={"text": "a"}, headers=headers)
    (span,) = recorded.spans()
    trace_id, span_id, parent_id = ids(span)
    assert trace_id != TRACE
    assert parent_id == ""
    trace = trace_of(http.engine)
    assert (trace.traceparent, trace.tracestate) == (f"00-{trace_id}-{span_id}-01", "")


async def test_a_call_of_a_model_has_its_name(engine: FakeEngine, recorded: Recorded) -> None:
    """Whichever of an engine's models it is."""
    async with observed(engine, recorded.measures) as http:
        ids = {"input_ids": [1, 2]}
        assert (await http.post("/v2/models/tiny.tokens/generate", json=ids)).status_code == 200
    (span,) = recorded.spans()
    assert (span.attributes or {})[names.REQUEST_MODEL] == "tiny.tokens"
    assert recorded.values(MODEL_CALL_DURATION) == {("tiny.tokens", ""): 1}


async def test_several_tracestate_headers_are_joined(http: Client) -> None:
    headers = [("traceparent", CLIENT), ("tracestate", "one=1"), ("tracestate", "two=2")]
    await http.post("/generate", json={"text": "a"}, headers=headers)
    assert trace_of(http.engine).tracestate == "one=1,two=2"


async def test_an_unsampled_trace_is_not_recorded(http: Client, recorded: Recorded) -> None:
    unsampled = CLIENT[:-1] + "0"
    await http.post("/generate", json={"text": "a"}, headers={"traceparent": unsampled})
    assert recorded.spans() == []
    assert trace_of(http.engine).traceparent == unsampled


async def test_an_unsampled_trace_is_passed_on(engine: FakeEngine) -> None:
    recorded = Recorded(TelemetryConfig(trace_ratio=0.0))
    async with observed(engine, recorded.measures) as http:
        await http.post("/generate", json={"text": "a"})
    assert recorded.spans() == []
    trace = trace_of(engine)
    assert (trace.is_valid, trace.sampled) == (True, False)


async def test_without_tracing_here_the_client_s_context_goes_on(engine: FakeEngine) -> None:
    async with observed(engine, Measures()) as http:
        await http.post("/generate", json={"text": "a"}, headers={"traceparent": CLIENT})
        await http.post("/generate", json={"text": "a"})
    assert [trace and trace.traceparent for trace in engine.traces] == [CLIENT, ""]


async def test_probes_begin_no_traces(http: Client, recorded: Recorded) -> None:
    await http.get("/health")
    assert recorded.spans() == []
    await http.get("/health", headers={"traceparent": CLIENT})
    (span,) = recorded.spans()
    assert (span.name, ids(span)[2]) == ("GET /health", SPAN)


async def test_unknown_paths_make_no_spans(http: Client, recorded: Recorded) -> None:
    await http.post("/nowhere", json={}, headers={"traceparent": CLIENT})
    assert recorded.spans() == []


@pytest.mark.parametrize(("code", "status"), [("lane_failed", 500), ("invalid_top_p", 400)])
async def test_client_errors_are_no_span_errors(
    http: Client, recorded: Recorded, code: str, status: int
) -> None:
    http.engine.outputs = refused(code)
    await http.post("/generate", json={"text": "a"})
    (span,) = recorded.spans()
    assert span.attributes[names.HTTP_STATUS] == status
    failed = status == 500
    assert span.status.is_unset != failed
    assert span.attributes[names.ERROR_TYPE] == code


async def test_a_stream_that_fails_is_an_error_with_its_code(
    http: Client, recorded: Recorded
) -> None:
    failed = refused("lane_failed")
    http.engine.outputs = lambda request: [chunk(request), *failed(request)]
    await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    (span,) = recorded.spans()
    assert not span.status.is_unset
    assert span.attributes[names.ERROR_TYPE] == "lane_failed"
    assert span.attributes[names.TIME_TO_FIRST_CHUNK] > 0
    measured = recorded.values(OPERATION_DURATION)
    assert measured == {("chat", "nano-inference", "tiny", "lane_failed"): 1}


# --- metrics ------------------------------------------------------------------------------------


async def test_calls_are_counted_by_route_and_status(http: Client, recorded: Recorded) -> None:
    for _ in range(2):
        await http.post("/generate", json={"text": "a"})
    await http.post("/generate", json={"text": 3})
    http.engine.failures["flush_cache"] = ZeroDivisionError()  # type: ignore[assignment]
    await http.post("/flush_cache")
    await http.post("/generate", json={"text": "a"}, headers={"Origin": "https://evil.example"})
    for path in ("/one", "/two"):
        await http.request("BREW", path)
    assert recorded.values(HTTP_DURATION) == {
        ("POST", "/generate", "200"): 2,
        ("POST", "/generate", "400"): 1,
        ("POST", "/generate", "403"): 1,
        ("POST", "/flush_cache", "500"): 1,
        ("_OTHER", "", "404"): 2,
    }


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v2/models/stats", "/v2/models/stats"),
        ("/v2/models/org%2Ftiny", "/v2/models/{model}"),
        ("/v2/models/org/tiny/infer", "/v2/models/{model}/infer"),
        ("/v2/models/tiny/versions/7/infer", "/v2/models/{model}/versions/{version}/infer"),
        ("/v1/responses/resp_1", "/v1/responses/{response_id}"),
        ("/v1/responses/resp_1/nothing", ""),
        ("/v3/models/tiny", ""),
    ],
)
async def test_parameters_in_a_path_make_no_routes(
    engine: FakeEngine, recorded: Recorded, path: str, route: str
) -> None:
    app = app_of(engine, measures=recorded.measures)
    routes = [each.path for each in app.routes if isinstance(each, Route)]
    async with http_of(ObservedCalls(app, recorded.measures, routes)) as http:
        await http.get(path, headers={"traceparent": CLIENT})
    assert [route for _, route, _ in recorded.values(HTTP_DURATION)] == [route]
    assert [span.name for span in recorded.spans()] == ([f"GET {route}"] if route else [])


async def test_calls_in_flight_are_measured(http: Client, recorded: Recorded) -> None:
    http.engine.outputs = lambda request: []
    calls = [asyncio.create_task(http.post("/generate", json={"text": "a"})) for _ in range(3)]
    await http.engine.until(lambda: len(http.engine.requests) == 3)
    assert recorded.values(GATEWAY_IN_FLIGHT) == {(): 3}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert recorded.values(GATEWAY_IN_FLIGHT) == {(): 0}
    assert recorded.values(HTTP_DURATION) == {("POST", "/generate", "499"): 3}


# --- the access log -----------------------------------------------------------------------------


async def logged(
    engine: FakeEngine, recorded: Recorded, path: str, method: str = "POST", **given: Any
) -> dict[str, Any]:
    """The line of one call, without its duration."""
    async with observed(engine, recorded.measures, access_log=True) as http:
        with capture_logs() as lines:
            await http.request(method, path, **given)
    (line,) = [dict(line) for line in lines if line["event"] == "http_call"]
    assert line.pop("duration_ms") >= 0
    return line


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_a_line_has_tenant_and_usage_without_text(
    engine: FakeEngine, recorded: Recorded, path: str, stream: bool
) -> None:
    headers = {"X-Request-Id": "mine", "X-Tenant": "lab", "traceparent": CLIENT}
    requests = 1 if path == "/v1/chat/completions" else 2
    line = await logged(
        engine, recorded, path, json=ASKED[path] | {"stream": stream}, headers=headers
    )
    (span,) = recorded.spans()
    assert line.pop("sent_bytes") > 50
    assert line == {
        "event": "http_call",
        "log_level": "info",
        "method": "POST",
        "route": path,
        "tenant": "lab",
        "prompt_tokens": 4 * requests,
        "completion_tokens": 2 * requests,
        "status": 200,
        "call_id": "mine",
        "client": "127.0.0.1",
        "trace_id": TRACE,
        "span_id": ids(span)[1],
    }


async def test_a_probe_has_no_tenant(engine: FakeEngine, recorded: Recorded) -> None:
    line = await logged(engine, recorded, "/health", "GET")
    assert (line["route"], line["status"], line["sent_bytes"]) == ("/health", 200, 0)
    assert not {"tenant", "prompt_tokens", "path", "complete"} & set(line)


async def test_a_disconnect_is_logged(engine: FakeEngine, recorded: Recorded) -> None:
    engine.outputs = lambda request: []
    async with observed(engine, recorded.measures, access_log=True) as http:
        with capture_logs() as lines:
            call = asyncio.create_task(http.post("/generate", json={"text": "a"}))
            await engine.until(lambda: len(engine.requests) == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    (line,) = lines
    assert (line["status"], line["complete"]) == (499, False)


async def test_the_access_log_is_off_by_default(http: Client) -> None:
    with capture_logs() as lines:
        await http.post("/generate", json={"text": "a"})
    assert lines == []


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_clients_can_not_forge_lines(
    engine: FakeEngine, recorded: Recorded, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    """Path, method and names can't add lines or fields, and are cut."""
    path = "/%0Aevent=faked%20status=200%1b[31m" + "x" * 5000
    before = structlog.get_config()
    try:
        setup_logging(TelemetryConfig(log_format=log_format))  # type: ignore[arg-type]
        async with observed(engine, recorded.measures, access_log=True) as http:
            headers = {"X-Request-Id": "a status=200 tenant=b", "X-Tenant": "lab status=500"}
            await http.request("BREW", path, headers=headers)
            await http.post("/generate", json={"text": "a"}, headers=headers)
    finally:
        structlog.configure(**before)
    lines = [line for line in capsys.readouterr().err.splitlines() if "http_call" in line]
    assert len(lines) == 2
    assert all(len(line) < 1000 and "\x1b" not in line for line in lines)
    brewed, generated = lines
    if log_format == "json":
        found = json.loads(brewed)
        assert (found["method"], found["route"], found["status"]) == ("_OTHER", "", 404)
        assert json.loads(generated)["tenant"] == "lab status=500"
    else:
        assert "status=404" in brewed
        assert "call_id='a status=200 tenant=b'" in generated
        assert "tenant='lab status=500'" in generated
