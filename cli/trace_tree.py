"""One request's spans out of a trace file, in the order in which a waterfall shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..config import ConfigError
from ..telemetry import names
from ..telemetry.trace_file import Span, read_spans

_ID_ATTRIBUTES = (names.REQUEST_ID, names.MESSAGE_ID)


class Row(msgspec.Struct, frozen=True):
    """A span and its place in the tree: 0 for the first of the trace."""

    span: Span
    depth: int


class Trace(msgspec.Struct, frozen=True):
    """A request's trace.

    Attributes:
        request_id: As its spans tell it.
        rows: A span behind its parent, siblings by their start.
        steps: Spans of steps of the lane that the request was in, as many as have one.
    """

    trace_id: str
    request_id: str
    rows: list[Row]
    steps: list[Span]

    @property
    def start_ns(self) -> int:
        return min(row.span.start_ns for row in self.rows)

    @property
    def end_ns(self) -> int:
        """Not before the last span's start, so that a division by the time taken is safe."""
        return max(self.start_ns + 1, *(row.span.end_ns for row in self.rows))

    @property
    def processes(self) -> list[str]:
        """That had a part in it."""
        instances = (row.span.resource.get(names.SERVICE_INSTANCE_ID, "") for row in self.rows)
        return sorted({str(instance) for instance in instances})


def find_trace(path: Path, wanted: str) -> Trace:
    """The newest trace of a request.

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
    own = [span for span in spans if _is_of(span, wanted)]
    if not own:
        raise ConfigError(
            f"the trace file {path} has no span of {wanted!r}; give a request's id, its entry's "
            "id, or a trace's id, of a request that was recorded"
        )
    trace_id = max(own, key=lambda span: span.start_ns).trace_id
    # A successor may have made one of its predecessor's spans again, under the same id.
    members = {
        span.span_id: span
        for span in sorted(spans, key=lambda span: -span.start_ns)
        if span.trace_id == trace_id
    }
    steps = [span for span in spans if trace_id in span.links]
    ids = [str(span.attributes.get(names.REQUEST_ID, "")) for span in members.values()]
    return Trace(
        trace_id=trace_id,
        request_id=next(filter(None, ids), trace_id),
        rows=_in_order(members.values()),
        steps=sorted(steps, key=lambda span: span.start_ns),
    )


def _is_of(span: Span, wanted: str) -> bool:
    return span.trace_id == wanted or any(
        span.attributes.get(name) == wanted for name in _ID_ATTRIBUTES
    )


def _in_order(spans: Iterable[Span]) -> list[Row]:
    known = {span.span_id: span for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in known.values():
        # The client's span may be in another file: then those below it are shown as the first.
        children[span.parent_id if span.parent_id in known else ""].append(span)
    rows: list[Row] = []
    pending = [(span, 0) for span in _last_first(children[""])]
    while pending:
        span, depth = pending.pop()
        rows.append(Row(span, depth))
        pending += [(child, depth + 1) for child in _last_first(children[span.span_id])]
    return rows


def _last_first(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns), reverse=True)
