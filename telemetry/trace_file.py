"""Spans in a file: OTLP's JSON encoding, one object per line.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding and
https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..config import line_safe
from . import names
from .context import TraceContext
from .spans import FinishedSpan, finished, scope

_KINDS, _ERROR = {"internal": 1, "server": 2, "client": 3, "producer": 4}, 2

Value = str | int | float | bool | list[str]


class FileExporter(SpanExporter):
    """Appends each batch of spans as one line, in one write.

    Several processes may share the file, and exported spans survive a killed process.
    """

    def __init__(self, path: Path, resource: Resource) -> None:
        """Raises OSError when the file can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        # The same for all spans of a process, so encoded once.
        attributes = _attributes(resource.attributes)
        self._resource = msgspec.Raw(msgspec.json.encode({"attributes": attributes}))
        self._scope = {"name": scope().name, "version": scope().version}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. A full disk only loses spans."""
        schema = {"schemaUrl": names.SCHEMA_URL}
        made = {"scope": self._scope, "spans": list(map(_encoded, finished(spans))), **schema}
        line = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [made], **schema}]}
        try:
            os.write(self._file, line_safe(msgspec.json.encode(line)) + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        os.close(self._file)


class Span(msgspec.Struct, frozen=True):
    """A span, as read from a file.

    Attributes:
        parent_id: "" for the first span of a trace.
        links: Ids of linked traces.
        error: Description of its error status; "" for success.
        resource: Attributes of the process that made it.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = {}
    events: tuple[tuple[str, int], ...] = ()
    links: tuple[str, ...] = ()
    error: str = ""
    resource: dict[str, Value] = {}

    @property
    def instance(self) -> str:
        """The `service.instance.id` of the process that made it."""
        return str(self.resource.get(names.SERVICE_INSTANCE_ID, ""))


def read_spans(path: Path) -> Iterator[Span]:
    """Yield all spans of a file, in the order in which they were written.

    Lines truncated by a killed process or a full disk are skipped.

    Raises:
        OSError: The file can't be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                content = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            for of_resource in content.get("resourceSpans", ()):
                resource = _values(of_resource.get("resource", {}))
                for scope in of_resource.get("scopeSpans", ()):
                    for span in scope.get("spans", ()):
                        yield _decoded(span, resource)


def _encoded(span: FinishedSpan) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "traceId": span.trace.trace_id,
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if not span.is_first:
        fields["parentSpanId"] = span.trace.span_id
    if span.events:
        fields["events"] = [{"timeUnixNano": str(at), "name": name} for name, at in span.events]
    if span.links:
        fields["links"] = [
            {"traceId": link.trace_id, "spanId": link.span_id}
            for link in map(TraceContext, span.links)
        ]
    if span.error:
        fields["status"] = {"code": _ERROR, "message": span.error}
    return fields


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _decoded(span: dict[str, Any], resource: dict[str, Value]) -> Span:
    status = span.get("status", {})
    return Span(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span["name"],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_values(span),
        events=tuple(
            (event["name"], int(event["timeUnixNano"])) for event in span.get("events", ())
        ),
        links=tuple(link["traceId"] for link in span.get("links", ())),
        error=(status.get("message") or "error") if status.get("code") == _ERROR else "",
        resource=resource,
    )


def _values(holder: dict[str, Any]) -> dict[str, Value]:
    return {each["key"]: _plain(each["value"]) for each in holder.get("attributes", ())}


def _plain(value: dict[str, Any]) -> Value:
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [str(_plain(item)) for item in content.get("values", ())]
    plain: Value = content
    return plain
