"""Spans to an OTLP endpoint: by OpenTelemetry's exporters, with an encoder for finished spans."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from types import ModuleType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from ..config import ConfigError, TelemetryConfig
from ..config.logger import get_logger
from .context import TraceContext
from .spans import SCOPE, FinishedSpan, Kind, finished

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_EXPORTERS = "opentelemetry.exporter.otlp.proto"

_FIELD_OF = {str: "string_value", int: "int_value", float: "double_value", bool: "bool_value"}

# https://github.com/open-telemetry/opentelemetry-proto, trace/v1/trace.proto
_PARENT_KNOWN, _PARENT_REMOTE = 0x100, 0x200

# Ids with their tags and lengths, as hex digits like the ids themselves.
_TRACE_ID, _SPAN_ID, _PARENT_ID = "0a10", "1208", "2208"
# A link is 33 bytes; its flags are a number of four, the lowest first.
_LINK, _LINK_FLAGS = "6a21", "35" + (_PARENT_KNOWN | _PARENT_REMOTE).to_bytes(4, "little").hex()
# The fields that no two spans share, each behind its tag: the id, start and end.
_OWN_FIELDS, _OWN_ID, _START, _END = Struct("<2s8sBQBQ"), bytes.fromhex(_SPAN_ID), 0x39, 0x41
_EVENTS = 11
_EVENT_TIME, _EVENT_TIME_TAG = Struct("<BQ"), 0x09

# Where what is inside is put: spans of a scope, scopes of a resource, resources of a request.
_SPANS, _SCOPES, _RESOURCES = 2, 2, 1
_ATTRIBUTES, _KEY, _VALUE, _STRING_VALUE = 9, 1, 2, 1

_MOST_KNOWN = 8192
"""Attributes whose encoding is kept: most values come again, a request's id with each span."""


def otlp_exporter(config: TelemetryConfig, resource: Resource) -> SpanExporter:
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
    encoder = SpanEncoder(resource)
    exporter: SpanExporter
    if protocol == "grpc":
        try:
            over_grpc = _with_encoder(f"{_EXPORTERS}.grpc.trace_exporter", encoder.message)
        except ImportError:
            raise ConfigError(
                "telemetry.otlp_protocol is 'grpc', whose packages are missing: "
                "pip install 'nano-inference[grpc]', or export over 'http'"
            ) from None
        insecure = True if address.startswith("http://") else None
        exporter = over_grpc.OTLPSpanExporter(endpoint=address or None, insecure=insecure)
    else:
        over_http = _with_encoder(f"{_EXPORTERS}.http.trace_exporter", encoder.serialized)
        exporter = over_http.OTLPSpanExporter(endpoint=f"{address}/v1/traces" if address else None)
    return exporter


def _with_encoder(name: str, encode: Callable[[Sequence[ReadableSpan]], Any]) -> ModuleType:
    """An exporter's module once more, for us alone, with `encode_spans` replaced.

    It is the one part of sending a span that costs something. Whoever else exports spans from this
    process has the module as it is.

    Raises:
        ImportError: It is not installed.
        ConfigError: It is of a version that encodes in another way.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if "encode_spans" not in vars(module):
        raise ConfigError(f"this version of {name} is not known: install one of constraints.txt")
    vars(module)["encode_spans"] = encode
    return module


class SpanEncoder:
    """Finished spans of one process as OTLP messages, three times as fast as by message objects.

    Protobuf defines that serialized messages, one behind the other, are one message with the fields
    of all. So each part is serialized by protobuf, once for as long as it comes again, and a span
    is its parts joined.
    """

    def __init__(self, resource: Resource) -> None:
        """Args: what says which process it is."""
        attributes = [_key_value(key, value) for key, value in resource.attributes.items()]
        of_process = ResourceSpans(resource=ResourceMessage(attributes=attributes))
        self._of_process = of_process.SerializeToString()
        self._scope = ScopeSpans(scope=InstrumentationScope(name=SCOPE.name)).SerializeToString()

    def encode(self, spans: Sequence[ReadableSpan]) -> bytes:
        """An ExportTraceServiceRequest.

        A span that protobuf can't hold (a number of more than 64 bits) is left out, and told.
        """
        parts = [self._scope]
        for span in finished(spans):
            try:
                parts.append(_within(_SPANS, _encoded(span)))
            except (TypeError, ValueError, StructError) as error:
                log = get_logger()
                log.warning("span_not_encoded", name=span.name, reason=str(error))
        return _within(_RESOURCES, self._of_process + _within(_SCOPES, b"".join(parts)))

    def message(self, spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        """The same as an object, which gRPC's stub serializes."""
        request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(
            self.encode(spans)
        )
        return request

    def serialized(self, spans: Sequence[ReadableSpan]) -> Serialized:
        """The same as what the HTTP exporter wants to serialize."""
        return Serialized(self.encode(spans))


class Serialized:
    """Stands for a message that is serialized already."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializePartialToString(self) -> bytes:
        """As protobuf names it."""
        return self._content


def _encoded(span: FinishedSpan) -> bytes:
    trace, is_first, attributes = span.trace, span.is_first, span.attributes
    own_id = span.span_id.to_bytes(8, "big")
    parts = [
        _place(trace.traceparent, is_first),
        _OWN_FIELDS.pack(_OWN_ID, own_id, _START, span.start_ns, _END, span.end_ns),
        _common(span.name, trace.tracestate, is_first, span.kind),
        *map(_attribute, attributes.keys(), attributes.values()),
    ]
    for event, at_ns in span.events:
        parts.append(_within(_EVENTS, _EVENT_TIME.pack(_EVENT_TIME_TAG, at_ns) + _event(event)))
    parts.extend(map(_link, span.links))
    if span.error:
        status = Status(code=Status.STATUS_CODE_ERROR, message=span.error)
        parts.append(_serialized(status=status))
    return b"".join(parts)


@lru_cache(_MOST_KNOWN)
def _place(traceparent: str, is_first: bool) -> bytes:
    """Which trace it is in, and below what: the stages' spans of a request have that in common."""
    trace_id, parent_id = TraceContext(traceparent).id_digits
    ids = f"{_TRACE_ID}{trace_id}"
    return bytes.fromhex(ids if is_first else f"{ids}{_PARENT_ID}{parent_id}")


@lru_cache(_MOST_KNOWN)
def _common(name: str, tracestate: str, is_first: bool, kind: Kind) -> bytes:
    flags = _PARENT_KNOWN if is_first else _PARENT_KNOWN | _PARENT_REMOTE
    number = Span.SpanKind.Value(f"SPAN_KIND_{kind.upper()}")
    return _serialized(name=name, trace_state=tracestate, kind=number, flags=flags)


@lru_cache(_MOST_KNOWN)
def _event(name: str) -> bytes:
    """All of it but its time."""
    event: bytes = Span.Event(name=name).SerializeToString()
    return event


@lru_cache(_MOST_KNOWN, typed=True)
def _attribute(key: str, value: Any) -> bytes:
    if type(value) is not str:
        return _serialized(attributes=[_key_value(key, value)])
    # A request's id is new with each request, and message objects take five times as long.
    text = _within(_STRING_VALUE, value.encode())
    return _within(_ATTRIBUTES, _within(_KEY, key.encode()) + _within(_VALUE, text))


def _serialized(**fields: Any) -> bytes:
    """Some fields of a span."""
    span: bytes = Span(**fields).SerializeToString()
    return span


def _key_value(key: str, value: Any) -> KeyValue:
    return KeyValue(key=key, value=_any_value(value))


def _any_value(value: Any) -> AnyValue:
    field = _FIELD_OF.get(type(value))
    if field is not None:
        return AnyValue(**{field: value})
    return AnyValue(array_value=ArrayValue(values=map(_any_value, value)))


@lru_cache(_MOST_KNOWN)
def _link(traceparent: str) -> bytes:
    """A step has one for each of its requests, the next step again."""
    trace_id, span_id = TraceContext(traceparent).id_digits
    return bytes.fromhex(f"{_LINK}{_TRACE_ID}{trace_id}{_SPAN_ID}{span_id}{_LINK_FLAGS}")


def _within(field: int, message: bytes) -> bytes:
    """A serialized message as a field of another one."""
    return _tag_and_length(field, len(message)) + message


@lru_cache(_MOST_KNOWN)
def _tag_and_length(field: int, length: int) -> bytes:
    # https://protobuf.dev/programming-guides/encoding/: type 2, then the length as a varint.
    encoded = bytearray((field << 3 | 2,))
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)
