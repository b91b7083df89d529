"""Spans to an OTLP endpoint: by OpenTelemetry's exporters, with an encoder for finished spans."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from ..config import ConfigError, TelemetryConfig
from .spans import SCOPE, FinishedSpan

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_EXPORTERS = "opentelemetry.exporter.otlp.proto"

# https://github.com/open-telemetry/opentelemetry-proto, trace/v1/trace.proto
_INTERNAL, _ERROR = 1, 2
_PARENT_KNOWN, _PARENT_REMOTE = 0x100, 0x200

_FIELD_OF = {str: "string_value", int: "int_value", float: "double_value", bool: "bool_value"}


def otlp_exporter(config: TelemetryConfig) -> SpanExporter:
    """OpenTelemetry's exporter, which reads the variables itself; it takes finished spans only.

    Raises:
        ConfigError: gRPC is wanted, and its packages are missing.
    """
    # An endpoint from our settings is a base address.
    address = config.otlp_endpoint.rstrip("/")
    protocol = config.otlp_protocol
    if protocol == "auto":
        wanted = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "")
        protocol = "grpc" if wanted == "grpc" else "http"
    found: SpanExporter
    if protocol == "grpc":
        try:
            over_grpc = _with_our_encoder(f"{_EXPORTERS}.grpc.trace_exporter")
        except ImportError:
            raise ConfigError(
                "telemetry.otlp_protocol is 'grpc', whose packages are missing: "
                "pip install 'nano-inference[grpc]', or export over 'http'"
            ) from None
        insecure = True if address.startswith("http://") else None
        found = over_grpc.OTLPSpanExporter(endpoint=address or None, insecure=insecure)
    else:
        over_http = _with_our_encoder(f"{_EXPORTERS}.http.trace_exporter")
        found = over_http.OTLPSpanExporter(endpoint=f"{address}/v1/traces" if address else None)
    return found


def _with_our_encoder(name: str) -> ModuleType:
    """An exporter's module once more, for us alone, with `encode_spans` replaced.

    It is the one part of sending a span that costs something. Whoever else exports spans from this
    process has the module as it is; should the library come to name its encoder otherwise, it
    encodes our spans too, and takes five times as long.

    Raises:
        ImportError: It is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["encode_spans"] = encode_spans
    return module


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Finished spans of one process as an OTLP message.

    A span that protobuf can't hold (a number of more than 64 bits) is left out, and told.
    """
    messages = [_message(span) for span in spans if isinstance(span, FinishedSpan)]
    try:
        return _request(spans[0].resource.attributes, messages)
    except (TypeError, ValueError) as error:
        structlog.get_logger().warning("spans_not_encoded", error=str(error))
        return _request(spans[0].resource.attributes, list(filter(_fits, messages)))


def _request(
    resource: Mapping[str, Any], messages: list[dict[str, Any]]
) -> ExportTraceServiceRequest:
    # Of nested dicts, since protobuf copies each message that is put in another.
    fields: dict[str, Any] = {
        "resource_spans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scope_spans": [{"scope": {"name": SCOPE.name}, "spans": messages}],
            }
        ]
    }
    return ExportTraceServiceRequest(**fields)


def _fits(message: dict[str, Any]) -> bool:
    try:
        _request({}, [message])
    except (TypeError, ValueError):
        return False
    return True


def _message(span: FinishedSpan) -> dict[str, Any]:
    trace_id, span_id = span.own.id_bytes
    message: dict[str, Any] = {
        "trace_id": trace_id,
        "span_id": span_id,
        "trace_state": span.own.tracestate,
        "name": span.title,
        "kind": _INTERNAL,
        "start_time_unix_nano": span.began_ns,
        "end_time_unix_nano": span.ended_ns,
        "attributes": _attributes(span.given),
        "flags": _PARENT_KNOWN,
    }
    if span.within is not None:
        _, message["parent_span_id"] = span.within.id_bytes
        message["flags"] = _PARENT_KNOWN | _PARENT_REMOTE
    if span.moments:
        message["events"] = [{"name": name, "time_unix_nano": at} for name, at in span.moments]
    if span.linked:
        message["links"] = [_link(*each.id_bytes) for each in span.linked]
    if span.error:
        message["status"] = {"code": _ERROR, "message": span.error}
    return message


def _link(trace_id: bytes, span_id: bytes) -> dict[str, Any]:
    return {
        "trace_id": trace_id,
        "span_id": span_id,
        "flags": _PARENT_KNOWN | _PARENT_REMOTE,
    }


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    field = _FIELD_OF.get(type(value))
    if field is not None:
        return {field: value}
    return {"array_value": {"values": [_value(each) for each in value]}}
