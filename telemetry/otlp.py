"""Spans to an OTLP receiver, over HTTP or gRPC.

https://opentelemetry.io/docs/specs/otlp/ and, for the environment's variables,
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import gzip
import os
import random
import re
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any
from urllib.parse import urlsplit

import httpx2
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
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.re import parse_env_headers

from ..config import ConfigError, TelemetryConfig, cut
from ..config.logger import get_logger
from .context import TraceContext
from .spans import SCOPE, FinishedSpan, Kind, finished

_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_RETRYABLE_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "OUT_OF_RANGE"}
    | {"UNAVAILABLE", "DATA_LOSS"}
)
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
# The system's message in the text of nested exceptions.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\"\\)]+)")
_MOST_REASON = 200


def variable(name: str) -> str:
    """Return a variable of OTLP exporters: the one for traces, else the one for all signals."""
    given = os.environ.get
    return given(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or given(f"OTEL_EXPORTER_OTLP_{name}") or ""


class SendError(Exception):
    """An export request failed.

    Attributes:
        reason: For the log.
        retryable: Whether the same request may succeed later.
    """

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


class HttpTransport:
    """OTLP over HTTP, with protobuf bodies."""

    def __init__(self, url: str) -> None:
        verify: ssl.SSLContext | bool = url.startswith("https:")
        if verify and (variable("CERTIFICATE") or variable("CLIENT_CERTIFICATE")):
            verify = ssl.create_default_context(cafile=variable("CERTIFICATE") or None)
            if certificate := variable("CLIENT_CERTIFICATE"):
                verify.load_cert_chain(certificate, variable("CLIENT_KEY") or None)
        headers = dict(parse_env_headers(variable("HEADERS"), liberal=True))
        headers["Content-Type"] = "application/x-protobuf"
        self._compress = _COMPRESS.get(compression := variable("COMPRESSION").lower())
        if self._compress is not None:
            headers["Content-Encoding"] = compression
        self._client = httpx2.Client(verify=verify, headers=headers)
        self._url = url

    def send(self, body: bytes, timeout_s: float) -> None:
        """Send an ExportTraceServiceRequest. Raises SendError."""
        content = body if self._compress is None else self._compress(body)
        try:
            response = self._client.post(self._url, content=content, timeout=timeout_s)
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise SendError(reason, retryable=isinstance(error, httpx2.TransportError)) from None
        if not response.is_success:
            status = response.status_code
            raise SendError(f"status {status}", retryable=status in _RETRYABLE_STATUSES)

    def close(self) -> None:
        self._client.close()


class GrpcTransport:
    """OTLP over gRPC."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError: grpcio is not installed."""
        try:
            import grpc
        except ImportError:
            raise ConfigError(
                "telemetry.otlp_protocol is 'grpc', which needs grpcio: "
                "pip install 'nano-inference[grpc]', or export over 'http'"
            ) from None
        self._error: type[Exception] = grpc.RpcError
        parts = urlsplit(endpoint)
        target = parts.netloc or endpoint
        compression = grpc.Compression.Gzip if variable("COMPRESSION").lower() == "gzip" else None
        if parts.scheme == "http" or (
            parts.scheme != "https" and variable("INSECURE").lower() == "true"
        ):
            self._channel = grpc.insecure_channel(target, compression=compression)
        else:
            files = (variable(name) for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"))
            contents = [Path(file).read_bytes() if file else None for file in files]
            credentials = grpc.ssl_channel_credentials(*contents)
            self._channel = grpc.secure_channel(target, credentials, compression=compression)
        # Without serializers a call takes and returns bytes.
        self._export = self._channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
        )
        self._metadata = tuple(parse_env_headers(variable("HEADERS"), liberal=True).items())

    def send(self, body: bytes, timeout_s: float) -> None:
        try:
            self._export(body, timeout=timeout_s, metadata=self._metadata)
        except self._error as error:
            code, details = error.code().name, error.details()  # type: ignore[attr-defined]
            raise SendError(details or code, retryable=code in _RETRYABLE_CODES) from None

    def close(self) -> None:
        self._channel.close()


Transport = HttpTransport | GrpcTransport


def transport_to(endpoint: str, config: TelemetryConfig) -> Transport:
    """Return a connection to a receiver.

    Args:
        endpoint: As `endpoint_of` returns it.
        config: Whether it is a base address of the settings, and the protocol.

    Raises:
        ConfigError: The protocol is gRPC, and grpcio is not installed.
    """
    protocol = config.otlp_protocol
    if protocol == "auto":
        protocol = "grpc" if variable("PROTOCOL") == "grpc" else "http"
    if protocol == "grpc":
        return GrpcTransport(endpoint)
    # Only the variable for traces is a full URL.
    is_full = not config.otlp_endpoint and os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return HttpTransport(endpoint if is_full else f"{endpoint.rstrip('/')}/v1/traces")


class OtlpExporter(SpanExporter):
    """Exports finished spans, with retries.

    The log has one line when the receiver is away, and one when it is back.
    """

    def __init__(self, transport: Transport, resource: Resource, endpoint: str) -> None:
        """Args: the connection; the attributes of this process; the receiver's address."""
        self._transport = transport
        self._encoder = SpanEncoder(resource)
        parts = urlsplit(endpoint)
        self._receiver = parts.netloc.rpartition("@")[2] or parts.path
        self._timeout_s = float(variable("TIMEOUT") or 10)
        self._stopped = threading.Event()
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. Waits exponentially longer between attempts, within the time limit."""
        body = self._encoder.encode(spans)
        end_s = time.monotonic() + self._timeout_s
        wait_s = random.uniform(0.8, 1.2)
        while True:
            try:
                self._transport.send(body, end_s - time.monotonic())
                break
            except SendError as error:
                self._report(error.reason)
                in_time = time.monotonic() + wait_s < end_s
                if not (error.retryable and in_time) or self._stopped.wait(wait_s):
                    return SpanExportResult.FAILURE
                wait_s *= 2
        if self._failing:
            self._failing = False
            get_logger().warning("spans_exported_again", receiver=self._receiver)
        return SpanExportResult.SUCCESS

    def _report(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            found = _SYSTEM_ERROR.search(reason)
            reason = found[1] if found else cut(reason, _MOST_REASON)
            get_logger().warning("spans_not_exported", receiver=self._receiver, reason=reason)

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._stopped.set()
        self._transport.close()


_FIELD_OF = {str: "string_value", int: "int_value", float: "double_value", bool: "bool_value"}

# https://github.com/open-telemetry/opentelemetry-proto, trace/v1/trace.proto
_PARENT_KNOWN, _PARENT_REMOTE = 0x100, 0x200

# Tags and lengths of ids, as hex digits like the ids themselves.
_TRACE_ID, _SPAN_ID, _PARENT_ID = "0a10", "1208", "2208"
# A link has 33 bytes; its flags are 4 bytes, little-endian.
_LINK, _LINK_FLAGS = "6a21", "35" + (_PARENT_KNOWN | _PARENT_REMOTE).to_bytes(4, "little").hex()
# Fields that differ in every span, each after its tag: id, start, end.
_OWN_FIELDS, _OWN_ID, _START, _END = Struct("<2s8sBQBQ"), bytes.fromhex(_SPAN_ID), 0x39, 0x41
_EVENTS = 11
_EVENT_TIME, _EVENT_TIME_TAG = Struct("<BQ"), 0x09

# Field numbers of nested messages.
_SPANS, _SCOPES, _RESOURCES = 2, 2, 1
_ATTRIBUTES, _KEY, _VALUE, _STRING_VALUE = 9, 1, 2, 1

_MOST_KNOWN = 8192
"""Cached encodings: most attributes repeat, a request's id in each of its spans."""


class SpanEncoder:
    """Encodes finished spans of one process as OTLP, three times as fast as message objects.

    By protobuf's definition, concatenated messages are one message with the fields of all. Each
    part is serialized by protobuf and cached; a span is the concatenation of its parts.
    """

    def __init__(self, resource: Resource) -> None:
        """Args: the attributes of this process."""
        attributes = [_key_value(key, value) for key, value in resource.attributes.items()]
        of_process = ResourceSpans(resource=ResourceMessage(attributes=attributes))
        self._of_process = of_process.SerializeToString()
        self._scope = ScopeSpans(scope=InstrumentationScope(name=SCOPE.name)).SerializeToString()

    def encode(self, spans: Sequence[ReadableSpan]) -> bytes:
        """Return an ExportTraceServiceRequest.

        A span that protobuf can't hold (a number of over 64 bits) is left out, with a log line.
        """
        parts = [self._scope]
        for span in finished(spans):
            try:
                parts.append(_within(_SPANS, _encoded(span)))
            except (TypeError, ValueError, StructError) as error:
                get_logger().warning("span_not_encoded", name=span.name, reason=str(error))
        return _within(_RESOURCES, self._of_process + _within(_SCOPES, b"".join(parts)))


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
    """Trace id and parent id, which the stages' spans of a request share."""
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
    """An event without its time."""
    event: bytes = Span.Event(name=name).SerializeToString()
    return event


@lru_cache(_MOST_KNOWN, typed=True)
def _attribute(key: str, value: Any) -> bytes:
    if type(value) is not str:
        return _serialized(attributes=[_key_value(key, value)])
    # Request ids are rarely cached, and message objects take five times as long.
    text = _within(_STRING_VALUE, value.encode())
    return _within(_ATTRIBUTES, _within(_KEY, key.encode()) + _within(_VALUE, text))


def _serialized(**fields: Any) -> bytes:
    """Return some fields of a span."""
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
    """A link. Consecutive steps link to the same requests."""
    trace_id, span_id = TraceContext(traceparent).id_digits
    return bytes.fromhex(f"{_LINK}{_TRACE_ID}{trace_id}{_SPAN_ID}{span_id}{_LINK_FLAGS}")


def _within(field: int, message: bytes) -> bytes:
    """Return a serialized message as a field of another message."""
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
