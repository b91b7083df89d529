"""Spans from timestamps, their parents, and nothing at all without an endpoint."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.config import TelemetryConfig
from nano_inference.telemetry import TraceContext, Tracing, endpoint_of, names, setup_tracing

PARENT = TraceContext("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "vendor=1")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return setup_tracing(TelemetryConfig(service_name="s"), "here-1", exporter)


def test_a_span_has_the_times_it_is_given(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.span("queue", PARENT, 1_000, 5_000, {names.STAGE: "x"}, events=[("first", 3_000)])
    tracing.shutdown()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == ("queue", 1_000, 5_000)
    assert [(event.name, event.timestamp) for event in span.events] == [("first", 3_000)]
    assert span.attributes == {names.STAGE: "x"}
    assert span.resource.attributes[names.SERVICE_NAME] == "s"
    assert span.resource.attributes[names.SERVICE_INSTANCE_ID] == "here-1"


def test_children_belong_to_the_parent_that_came_with_the_request(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    child = tracing.span("child", PARENT, 1, 2, {})
    tracing.span("grandchild", child, 1, 2, {})
    tracing.shutdown()
    first, second = exporter.get_finished_spans()
    assert format(first.context.trace_id, "032x") == "a" * 32 == child.trace_id
    assert first.parent is not None
    assert format(first.parent.span_id, "016x") == "b" * 16
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    assert child.tracestate == "vendor=1"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_without_a_valid_parent_a_trace_begins(tracing: Tracing, traceparent: str) -> None:
    context = TraceContext(traceparent)
    assert context.trace_id == ""
    assert len(tracing.span("root", context, 1, 2, {}).trace_id) == 32


def test_an_end_before_the_start_is_no_negative_span(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    tracing.span("odd", PARENT, 10, 5, {})
    tracing.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.end_time == span.start_time == 10


def test_errors_carry_their_code(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.span("refused", PARENT, 1, 2, {}, error="empty_prompt")
    tracing.shutdown()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes[names.ERROR_TYPE] == "empty_prompt"


def test_an_unsampled_parent_stays_unsampled(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    unsampled = TraceContext(PARENT.traceparent[:-1] + "0")
    child = tracing.span("child", unsampled, 1, 2, {})
    tracing.shutdown()
    assert exporter.get_finished_spans() == ()
    assert child.trace_id == "a" * 32


def test_without_an_endpoint_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    tracing = setup_tracing(TelemetryConfig(), "here")
    assert not tracing.enabled
    assert tracing.span("x", PARENT, 1, 2, {}) is PARENT
    tracing.shutdown()


def test_settings_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://from-environment:1")
    assert endpoint_of(TelemetryConfig()) == "http://from-environment:1"
    assert endpoint_of(TelemetryConfig(otlp_endpoint="http://set:2")) == "http://set:2"
