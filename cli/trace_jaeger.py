"""A trace in the form of Jaeger's query API, which its UI loads from a file.

https://www.jaegertracing.io/docs/2.0/architecture/apis/
"""

from __future__ import annotations

from typing import Any

from ..telemetry import names
from ..telemetry.trace_file import Span, Value
from .trace_tree import Trace

_TYPES = {bool: "bool", int: "int64", float: "float64"}


def jaeger(trace: Trace) -> dict[str, Any]:
    """What `GET /api/traces/{id}` of Jaeger would answer; times in whole microseconds."""
    known = {row.span.span_id for row in trace.rows}
    processes = {instance: f"p{n}" for n, instance in enumerate(trace.processes, 1)}
    resources = {
        processes[str(row.span.resource.get(names.SERVICE_INSTANCE_ID, ""))]: row.span.resource
        for row in trace.rows
    }
    return {
        "data": [
            {
                "traceID": trace.trace_id,
                "spans": [_span(row.span, known, processes) for row in trace.rows],
                "processes": {
                    name: {
                        "serviceName": resource.get(names.SERVICE_NAME, "nano-inference"),
                        "tags": [_tag(key, value) for key, value in resource.items()],
                    }
                    for name, resource in resources.items()
                },
            }
        ]
    }


def _span(span: Span, known: set[str], processes: dict[str, str]) -> dict[str, Any]:
    parent = {"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_id}
    tags = [_tag(key, value) for key, value in span.attributes.items()]
    if span.error:
        tags += [_tag("error", True), _tag("otel.status_description", span.error)]
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": [parent] if span.parent_id in known else [],
        "startTime": span.start_ns // 1000,
        "duration": (span.end_ns - span.start_ns) // 1000,
        "tags": tags,
        "logs": [
            {"timestamp": event.at_ns // 1000, "fields": [_tag("event", event.name)]}
            for event in span.events
        ],
        "processID": processes[str(span.resource.get(names.SERVICE_INSTANCE_ID, ""))],
    }


def _tag(key: str, value: Value) -> dict[str, Any]:
    if isinstance(value, list):
        return {"key": key, "type": "string", "value": ", ".join(value)}
    return {"key": key, "type": _TYPES.get(type(value), "string"), "value": value}
