"""One request's trace out of a trace file: its spans as a tree, and in Jaeger's form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..config import ConfigError
from . import names
from .trace_file import Span, Value, read_spans

_JAEGER_TYPES = {bool: "bool", int: "int64", float: "float64"}


class Trace(msgspec.Struct, frozen=True):
    """A request's trace.

    Attributes:
        rows: Spans with their depths in the tree; parents before children, siblings by start.
        steps: Recorded steps of the lane that the request was in.
    """

    trace_id: str
    request_id: str
    rows: list[tuple[Span, int]]
    steps: list[Span]

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span, _ in self.rows)

    @property
    def end_ns(self) -> int:
        """After the start, so that division by the duration is safe."""
        return max(self.start_ns + 1, *(span.end_ns for span, _ in self.rows))

    @property
    def processes(self) -> list[str]:
        """Processes that made spans, by `service.instance.id`."""
        return sorted({span.instance for span, _ in self.rows})

    @property
    def time(self) -> dict[str, int]:
        """The request's time by cause, from the span with most of it; {} if none has any."""
        times = (names.time_of(span.attributes) for span, _ in self.rows)
        return max(times, key=lambda time: sum(time.values()), default={})


def find_trace(path: Path, wanted: str) -> Trace:
    """Return the newest trace of a request.

    Args:
        path: A trace file.
        wanted: The request's id, its entry's id, or the trace's id.

    Raises:
        ConfigError: The file can't be read, or has no such trace.
    """
    try:
        spans = list(read_spans(path))
    except OSError as error:
        raise ConfigError(
            f"the trace file {path} can't be read: {error.strerror or error}; start the pipeline "
            "with --set telemetry.trace_file=FILE, and give that file"
        ) from None
    if not spans:
        raise ConfigError(
            f"no line of the trace file {path} is a span; give a file that a pipeline writes with "
            "--set telemetry.trace_file=FILE"
        )
    ids = (names.REQUEST_ID, names.MESSAGE_ID)
    found = [
        span for span in spans if wanted == span.trace_id or wanted in map(span.attributes.get, ids)
    ]
    if not found:
        raise ConfigError(
            f"the trace file {path} has no span of {wanted!r}; give a request's id, its entry's "
            "id, or a trace's id, of a request that was recorded"
        )
    trace_id = max(found, key=lambda span: span.start_ns).trace_id
    # A restarted process may have made a span of its predecessor again, with the same id.
    members = {
        span.span_id: span
        for span in sorted(spans, key=lambda span: -span.start_ns)
        if span.trace_id == trace_id
    }
    request_ids = (str(span.attributes.get(names.REQUEST_ID, "")) for span in members.values())
    return Trace(
        trace_id=trace_id,
        request_id=next(filter(None, request_ids), trace_id),
        rows=_in_order(members),
        steps=sorted(
            (span for span in spans if trace_id in span.links), key=lambda span: span.start_ns
        ),
    )


def _in_order(spans: dict[str, Span]) -> list[tuple[Span, int]]:
    children: dict[str, list[Span]] = defaultdict(list)
    for span in spans.values():
        # A parent in another file, such as the client's span: its children are roots here.
        children[span.parent_id if span.parent_id in spans else ""].append(span)
    rows: list[tuple[Span, int]] = []
    pending = [(span, 0) for span in _last_first(children[""])]
    while pending:
        span, depth = row = pending.pop()
        rows.append(row)
        pending += [(child, depth + 1) for child in _last_first(children[span.span_id])]
    return rows


def _last_first(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns), reverse=True)


def jaeger(trace: Trace) -> dict[str, Any]:
    """Return a trace as Jaeger's query API does, which its UI loads from a file.

    https://www.jaegertracing.io/docs/2.0/architecture/apis/ ; times are in microseconds.
    """
    known = {span.span_id for span, _ in trace.rows}
    processes = {instance: f"p{number}" for number, instance in enumerate(trace.processes, 1)}
    resources = {processes[span.instance]: span.resource for span, _ in trace.rows}
    data = {
        "traceID": trace.trace_id,
        "spans": [_jaeger_span(span, known, processes[span.instance]) for span, _ in trace.rows],
        "processes": {
            name: {
                "serviceName": resource.get(names.SERVICE_NAME, "nano-inference"),
                "tags": [_tag(key, value) for key, value in resource.items()],
            }
            for name, resource in resources.items()
        },
    }
    return {"data": [data]}


def _jaeger_span(span: Span, known: set[str], process: str) -> dict[str, Any]:
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
            {"timestamp": at_ns // 1000, "fields": [_tag("event", name)]}
            for name, at_ns in span.events
        ],
        "processID": process,
    }


def _tag(key: str, value: Value) -> dict[str, Any]:
    if isinstance(value, list):
        value = ", ".join(value)
    return {"key": key, "type": _JAEGER_TYPES.get(type(value), "string"), "value": value}
