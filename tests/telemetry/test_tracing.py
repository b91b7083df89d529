"""Spans from timestamps, their parents, and nothing at all without an endpoint."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.json_format import Parse
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from nano_inference.config import ConfigError, TelemetryConfig
from nano_inference.telemetry import TraceContext, Tracing, endpoint_of, names, setup_tracing
from nano_inference.telemetry.otlp import OtlpExporter
from nano_inference.telemetry.span_messages import Request, span_message
from nano_inference.telemetry.spans import finished
from nano_inference.telemetry.trace_file import Span, read_spans
from nano_inference.telemetry.tracing import MOST_BUFFERED

from ..measured import Kept

PARENT = TraceContext("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "vendor=1")
UNSAMPLED = TraceContext(PARENT.traceparent[:-1] + "0")
LIMIT_S = 60
HERE = Resource.create({names.SERVICE_NAME: "s", names.SERVICE_INSTANCE_ID: "here-1"})


class Traced:
    """Tracing in memory, and the spans that it has made once it has ended."""

    def __init__(self, labels: dict[str, str] | None = None, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        config = TelemetryConfig(service_name="s", **settings)
        self.tracing = setup_tracing(config, "here-1", self.exporter, labels=labels)
        self.span = self.tracing.span

    def end(self) -> tuple[ReadableSpan, ...]:
        self.tracing.shutdown()
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Traced:
    return Traced()


def ids_of(span: ReadableSpan) -> tuple[str, str, str]:
    """Its trace's id, its own, and its parent's."""
    parent = format(span.parent.span_id, "016x") if span.parent else ""
    return format(span.context.trace_id, "032x"), format(span.context.span_id, "016x"), parent


def test_a_span_has_the_times_it_is_given(traced: Traced) -> None:
    traced.span("queue", PARENT, 1_000, 5_000, {names.STAGE: "x"}, events=[("first", 3_000)])
    traced.span("odd", PARENT, 10, 5, {})
    span, odd = traced.end()
    assert (span.name, span.start_time, span.end_time) == ("queue", 1_000, 5_000)
    assert [(event.name, event.timestamp) for event in span.events] == [("first", 3_000)]
    assert span.attributes == {names.STAGE: "x"}
    assert span.resource.attributes[names.SERVICE_NAME] == "s"
    assert span.resource.attributes[names.SERVICE_INSTANCE_ID] == "here-1"
    assert odd.end_time == odd.start_time == 10, "never negative"


def test_attributes_of_a_process_are_those_of_all_its_spans() -> None:
    traced = Traced(labels={names.REQUEST_MODEL: "a"})
    traced.span("queue", PARENT, 1_000, 5_000, {})
    (span,) = traced.end()
    assert span.resource.attributes[names.REQUEST_MODEL] == "a"
    assert not span.attributes


def test_children_belong_to_the_parent_that_came_with_the_request(traced: Traced) -> None:
    child = traced.tracing.begin_below(PARENT)
    traced.span("grandchild", child, 2, 3, {})
    traced.span("child", PARENT, 1, 4, {}, own=child, kind="server")  # made after its child
    inner, outer = traced.end()
    assert ids_of(outer) == ("a" * 32, child.span_id, "b" * 16)
    assert ids_of(inner)[::2] == ("a" * 32, child.span_id)
    assert child.tracestate == "vendor=1"
    assert (inner.kind, outer.kind) == (SpanKind.INTERNAL, SpanKind.SERVER)


def test_an_unsampled_parent_stays_unsampled(traced: Traced) -> None:
    assert traced.tracing.begin_below(UNSAMPLED) is UNSAMPLED
    traced.span("outer", UNSAMPLED, 1, 4, {}, own=UNSAMPLED)
    traced.span("child", UNSAMPLED, 1, 2, {})
    assert traced.end() == ()


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_an_invalid_context_has_no_ids(traceparent: str) -> None:
    context = TraceContext(traceparent)
    assert (context.is_valid, context.trace_id, context.log_ids) == (False, "", {})


def test_errors_carry_their_code(traced: Traced) -> None:
    traced.span("refused", PARENT, 1, 2, {}, error="empty_prompt")
    (span,) = traced.end()
    assert not span.status.is_ok
    assert span.attributes[names.ERROR_TYPE] == "empty_prompt"


def test_without_an_endpoint_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    tracing = setup_tracing(TelemetryConfig(), "here")
    assert not tracing.enabled
    assert tracing.begin_below(PARENT) is PARENT
    tracing.span("x", PARENT, 1, 2, {})
    tracing.shutdown()


def test_settings_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://from-environment:1")
    assert endpoint_of(TelemetryConfig()) == "http://from-environment:1"
    assert endpoint_of(TelemetryConfig(otlp_endpoint="http://set:2")) == "http://set:2"


# --- which traces are recorded ------------------------------------------------------------------


def test_a_share_of_the_traces_begun_here_is_recorded() -> None:
    traced = Traced(trace_ratio=0.25)
    for number in range(400):
        own = traced.tracing.begin(f"entry-{number}")
        traced.span("root", TraceContext(), 1, 2, {}, own=own)
        traced.span("child", own, 1, 2, {})
    spans = traced.end()
    traces = [span.context.trace_id for span in spans if span.name == "root"]
    assert 60 < len(traces) < 140
    children = {span.context.trace_id for span in spans if span.name == "child"}
    assert children == set(traces), "a trace is recorded as a whole or not at all"


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_client_that_records_is_followed_whatever_the_share(ratio: float) -> None:
    traced = Traced(trace_ratio=ratio)
    traced.span("child", PARENT, 1, 2, {})
    assert len(traced.end()) == 1


@pytest.mark.parametrize(("sampler", "number"), [("always_off", 0), ("parentbased_always_off", 1)])
def test_a_sampler_of_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, sampler: str, number: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    traced = Traced()
    traced.span("root", TraceContext(), 1, 2, {})
    traced.span("child", PARENT, 1, 2, {})
    assert len(traced.end()) == number


def test_the_same_root_gives_the_same_trace_in_each_process() -> None:
    first, second = Traced().tracing, Traced().tracing
    assert first.begin("entry").traceparent == second.begin("entry").traceparent
    assert first.begin("entry").traceparent != first.begin("other").traceparent
    first.shutdown()
    second.shutdown()


def test_links_lead_to_other_traces(traced: Traced) -> None:
    traced.span("step", TraceContext(), 1, 2, {}, links=[PARENT.traceparent] * 200)
    (span,) = traced.end()
    assert {format(link.context.trace_id, "032x") for link in span.links} == {"a" * 32}
    assert len(span.links) == 128
    assert span.parent is None


# --- where spans go -----------------------------------------------------------------------------


class Receiver:
    """The spans that came over OTLP, decoded from the bytes.

    Attributes:
        encoding: How the last request was compressed.
        statuses: Answers to the next requests in place of success.
        has_request: Set once there is one.
        may_answer: Unless it is set, requests wait.
    """

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.encoding: str | None = None
        self.statuses: list[int] = []
        self.has_request, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def add(self, request: ExportTraceServiceRequest) -> None:
        self.requests.append(request)
        self.has_request.set()
        self.may_answer.wait(LIMIT_S)

    def check(self) -> None:
        (request,) = self.requests
        (resource,) = request.resource_spans
        attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert attributes[names.SERVICE_NAME] == "s"
        assert attributes[names.SERVICE_INSTANCE_ID] == "here-1"
        (span,) = resource.scope_spans[0].spans
        assert (span.name, span.trace_id.hex()) == ("queue", "a" * 32)
        assert span.parent_span_id.hex() == "b" * 16
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000, 5_000)
        assert [(event.name, event.time_unix_nano) for event in span.events] == [("first", 3_000)]
        assert (span.status.code, span.status.message) == (2, "expired")
        assert span.kind == SpanMessage.SPAN_KIND_SERVER


def make_call_span(tracing: Tracing) -> None:
    """Record the span that `Receiver.check` expects."""
    events = [("first", 3_000)]
    tracing.span("queue", PARENT, 1_000, 5_000, {}, events=events, error="expired", kind="server")


@pytest.fixture
def http_receiver() -> Iterator[tuple[str, Receiver]]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers = dict(self.headers)
            receiver.encoding = self.headers["Content-Encoding"]
            if receiver.encoding == "gzip":
                body = gzip.decompress(body)
            receiver.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", receiver
        server.shutdown()


@pytest.fixture
def grpc_receiver() -> Iterator[tuple[str, Receiver]]:
    receiver = Receiver()

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> Any:
            receiver.headers = dict(context.invocation_metadata())
            receiver.add(request)
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"http://127.0.0.1:{port}", receiver
        server.stop(None).wait()


@pytest.mark.parametrize("by", ["settings", "environment"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_spans_arrive_over(
    protocol: str, by: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, receiver = request.getfixturevalue(f"{protocol}_receiver")
    if by == "settings":
        config = TelemetryConfig(otlp_endpoint=url, otlp_protocol=protocol, service_name="s")
    else:
        config = TelemetryConfig(service_name="s")
        for name, value in (("PROTOCOL", protocol), ("ENDPOINT", url), ("HEADERS", "api-key=k")):
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    tracing = setup_tracing(config, "here-1")
    make_call_span(tracing)
    tracing.shutdown()
    receiver.check()
    if protocol == "http":
        assert receiver.encoding == ("gzip" if by == "environment" else None)
    assert receiver.headers.get("api-key") == ("k" if by == "environment" else None)


def spans_of(request: ExportTraceServiceRequest) -> dict[str, SpanMessage]:
    return {span.name: span for span in request.resource_spans[0].scope_spans[0].spans}


def test_all_of_a_span_arrives(http_receiver: tuple[str, Receiver]) -> None:
    url, receiver = http_receiver
    tracing = setup_tracing(TelemetryConfig(otlp_endpoint=url), "here-1")
    attributes = {names.STAGE: "é", names.SAMPLES: -3, "share": 0.5, names.FINISH_REASONS: ("a",)}
    root = tracing.begin()
    tracing.span("root", TraceContext(), 5, 9, {"yes": True}, own=root)
    tracing.span("child", root, 1_000, 5_000, attributes)
    links = [PARENT.traceparent, root.traceparent]
    tracing.span("far", PARENT, 1_000, 2_000, {"long": "x" * 20_000}, links=links)
    tracing.shutdown()
    spans = spans_of(receiver.requests[0])
    assert spans["root"].attributes[0].value.bool_value
    assert spans["root"].parent_span_id == b""
    assert spans["child"].parent_span_id == spans["root"].span_id
    found = {each.key: each.value for each in spans["child"].attributes}
    assert (found[names.STAGE].string_value, found[names.SAMPLES].int_value) == ("é", -3)
    assert found["share"].double_value == 0.5
    assert [each.string_value for each in found[names.FINISH_REASONS].array_value.values] == ["a"]
    assert (spans["far"].trace_state, spans["far"].flags) == ("vendor=1", 0x300)
    assert len(spans["far"].attributes[0].value.string_value) == 20_000
    assert [link.trace_id.hex() for link in spans["far"].links] == ["a" * 32, root.trace_id]


def test_the_messages_are_those_of_opentelemetrys_encoder() -> None:
    kept = Kept()
    tracing = Tracing(TracerProvider(), [SimpleSpanProcessor(kept)])
    root, late = tracing.begin(), 2**63 + 5
    values = {"é": "ü" * 2_000, "": -3, "b": True, "f": 0.5, "many": ("a", "b"), "big": 2**63 - 1}
    events, links = (("first", 7), ("second", late)), [PARENT.traceparent, root.traceparent]
    tracing.span("root", TraceContext(), 5, 9, values, own=root, kind="server")
    tracing.span("child", PARENT, 5, late, {}, events=events, links=links, error="broken")
    made = [*finished(kept.spans)]
    own = ExportTraceServiceRequest.FromString(Request(HERE).encoded([*map(span_message, made)]))
    assert own == encode_spans([span.readable(HERE) for span in made])


def test_a_span_that_protobuf_cannot_hold_costs_no_other(
    http_receiver: tuple[str, Receiver],
) -> None:
    url, receiver = http_receiver
    tracing = setup_tracing(TelemetryConfig(otlp_endpoint=url), "here-1")
    for name, value in (("one", 1), ("two", 2**70), ("three", "\ud800"), ("four", 4)):
        tracing.span(name, PARENT, 1, 2, {"value": value})
    tracing.span("long ago", PARENT, -1, 2, {})
    tracing.span("never", PARENT, 1, 2**64, {})
    tracing.span("lost", TraceContext("00-" + "x" * 32 + "-" + "b" * 16 + "-01"), 1, 2, {})
    with structlog.testing.capture_logs() as lines:
        tracing.shutdown()
    assert [line["name"] for line in lines] == ["long ago", "never", "lost"]
    spans = spans_of(receiver.requests[0])
    assert {name: len(span.attributes) for name, span in spans.items()} == {
        **{"one": 1, "four": 1},
        **{"two": 0, "three": 0},
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_unreachable_receiver_does_not_delay_shutdown_and_is_one_line(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Nothing listens on port 1.
    endpoint = "http://127.0.0.1:1" if protocol == "grpc" else "http://user:secret@127.0.0.1:1"
    config = TelemetryConfig(otlp_endpoint=endpoint, otlp_protocol=protocol)
    with structlog.testing.capture_logs() as lines:
        tracing = setup_tracing(config, "here")
        tracing.span("lost", PARENT, 1, 2, {})
        tracing.shutdown()
    (line,) = lines
    assert (line["event"], line["receiver"]) == ("spans_not_exported", "127.0.0.1:1")
    assert protocol == "grpc" or line["reason"] == "Connection refused"
    assert not caplog.records


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_receiver_that_hangs_delays_no_span_and_no_end(
    protocol: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without limits the end would wait for the export's own, OTEL_EXPORTER_OTLP_TIMEOUT."""
    monkeypatch.setattr("nano_inference.telemetry.tracing.SHUTDOWN_MS", 100)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(LIMIT_S))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    url, receiver = request.getfixturevalue(f"{protocol}_receiver")
    receiver.may_answer.clear()
    tracing = setup_tracing(TelemetryConfig(otlp_endpoint=url, otlp_protocol=protocol), "here")
    start_s = time.monotonic()
    make_call_span(tracing)
    assert receiver.has_request.wait(LIMIT_S)
    for _ in range(2 * MOST_BUFFERED):
        tracing.span("kept or dropped", PARENT, 1, 2, {})
    tracing.shutdown()
    assert time.monotonic() - start_s < LIMIT_S / 2
    receiver.may_answer.set()


def test_the_last_export_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.telemetry.tracing.SHUTDOWN_MS", 0)
    ended = threading.Event()

    class Away(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            ended.wait()
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            ended.set()

    tracing = setup_tracing(TelemetryConfig(), "here", Away())
    tracing.span("lost", PARENT, 1, 2, {})
    tracing.shutdown()
    assert ended.is_set()


def test_only_retryable_errors_are_retried_and_an_outage_is_two_lines(
    http_receiver: tuple[str, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    url, receiver = http_receiver
    receiver.statuses = [400, 503, 200]
    tracing = setup_tracing(TelemetryConfig(otlp_endpoint=url), "here-1")
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            make_call_span(tracing)
            tracing.flush()
    tracing.shutdown()
    assert len(receiver.requests) == 4
    assert [line["event"] for line in lines] == ["spans_not_exported", "spans_exported_again"]
    assert "400" in lines[0]["reason"]
    assert not caplog.records


def test_lines_of_other_exporters_in_the_process_stay(caplog: pytest.LogCaptureFixture) -> None:
    exporter = OtlpExporter(InMemorySpanExporter(), HERE, "collector")
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    logger.warning("of another")
    exporter.shutdown()
    assert [record.message for record in caplog.records] == ["of another"]


def test_a_variable_without_a_valid_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:1", otlp_protocol="grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_COMPRESSION"):
        setup_tracing(config, "here")


def test_exporters_are_imported_only_with_an_endpoint() -> None:
    code = (
        "import sys; from nano_inference.config import TelemetryConfig as C;"
        "from nano_inference.telemetry import setup_tracing;"
        "setup_tracing(C(otlp_endpoint=sys.argv[1]), 'here').shutdown();"
        "print([name for name in sys.modules if 'exporter.otlp' in name or name == 'requests'])"
    )
    for endpoint, imported in (("", False), ("http://127.0.0.1:1", True)):
        ran = subprocess.run(
            [sys.executable, "-c", code, endpoint], capture_output=True, text=True, check=True
        )
        assert (ran.stdout != "[]\n") is imported, ran.stdout


def test_the_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    held = threading.Event()

    class Slow(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            held.wait(10)
            return super().export(spans)

    exporter = Slow()
    tracing = setup_tracing(TelemetryConfig(), "here", exporter)
    for number in range(20):
        tracing.span(str(number), PARENT, 1, 2, {})
    held.set()
    tracing.shutdown()
    assert 4 <= len(exporter.get_finished_spans()) <= 8


def test_spans_are_read_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "traces.jsonl"
    config = TelemetryConfig(trace_file=str(path), service_name="s")
    tracing = setup_tracing(config, "here-1")
    attributes = {names.STAGE: "x\u2028y\x85", names.SAMPLES: 3, "share": 0.5}
    tracing.span(
        *("queue", PARENT, 1_000, 5_000, {**attributes, names.FINISH_REASONS: ("a",)}),
        events=[("first", 3_000)],
        links=[PARENT.traceparent],
        error="expired",
    )
    (span,) = read_spans(path)
    assert span == Span(
        trace_id="a" * 32,
        span_id=span.span_id,
        parent_id="b" * 16,
        name="queue",
        start_ns=1_000,
        end_ns=5_000,
        attributes={**attributes, names.FINISH_REASONS: ["a"], names.ERROR_TYPE: "expired"},
        events=(("first", 3_000),),
        links=("a" * 32,),
        error="expired",
        resource=span.resource,
    )
    assert span.resource[names.SERVICE_INSTANCE_ID] == "here-1"
    assert len(path.read_text().splitlines()) == 1
    tracing.shutdown()
    path.open("a").write('{"resourceSpans": [{"reso')
    assert len(list(read_spans(path))) == 1, "a line that was cut off is left out"


def test_a_file_is_otlp_json(tmp_path: Path) -> None:
    """Held against the protobuf definition, in which JSON has ids in base64 and not in hex."""
    path = tmp_path / "traces.jsonl"
    tracing = setup_tracing(TelemetryConfig(trace_file=str(path), service_name="s"), "here-1")
    make_call_span(tracing)
    tracing.shutdown()
    content = json.loads(path.read_text())
    (span,) = content["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for name in ("traceId", "spanId", "parentSpanId"):
        span[name] = b64encode(bytes.fromhex(span[name])).decode()
    receiver = Receiver()
    receiver.requests.append(Parse(json.dumps(content), ExportTraceServiceRequest()))
    receiver.check()


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    code = (
        "import sys; from nano_inference.config import TelemetryConfig as C;"
        "from nano_inference.telemetry import setup_tracing, TraceContext as T;"
        "t = setup_tracing(C(trace_file=sys.argv[1]), sys.argv[2]);"
        "[t.span(str(i), T(), 1, 2, {'text': 'x' * 3000}) for i in range(200)]"
    )
    commands = [[sys.executable, "-c", code, str(path), str(number)] for number in range(3)]
    processes = [subprocess.Popen(command, env=os.environ) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    found = {(span.resource[names.SERVICE_INSTANCE_ID], span.name) for span in read_spans(path)}
    assert len(found) == 600, "no line was torn"


def test_an_unwritable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_file"):
        setup_tracing(TelemetryConfig(trace_file=str(tmp_path)), "here")
