"""W3C trace contexts, kept as the headers' text.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re

from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags, TraceState

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?"
)
_TRACE_ID, _SPAN_ID, _FLAGS = slice(3, 35), slice(36, 52), slice(53, 55)

# The lowest bit of the flags says "sampled".
_SAMPLED = frozenset(format(flags, "02x") for flags in range(1, 256, 2))


class TraceContext:
    """A trace context: the two headers, parsed only where the ids are needed."""

    __slots__ = ("traceparent", "tracestate")

    def __init__(self, traceparent: str = "", tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate

    def child(self, span_id: int) -> TraceContext:
        """Return the context of a recorded child span. The context must be valid.

        Args:
            span_id: 64 bits, not all 0.
        """
        return TraceContext(f"00-{self.traceparent[_TRACE_ID]}-{span_id:016x}-01", self.tracestate)

    @property
    def is_valid(self) -> bool:
        """Whether the traceparent follows the specification."""
        match = _TRACEPARENT.fullmatch(self.traceparent)
        # Version 00 ends after the flags; later versions may continue.
        return match is not None and (match[4] is None or match[1] != "00")

    @property
    def sampled(self) -> bool:
        """Whether the trace is recorded."""
        return is_sampled(self.traceparent)

    @property
    def trace_id(self) -> str:
        """32 hex digits; "" for an invalid context."""
        return self.traceparent[_TRACE_ID] if self.is_valid else ""

    @property
    def span_id(self) -> str:
        """16 hex digits; "" for an invalid context."""
        return self.traceparent[_SPAN_ID] if self.is_valid else ""

    @property
    def id_digits(self) -> tuple[str, str]:
        """Trace id and span id, 32 and 16 hex digits. The context must be valid."""
        text = self.traceparent
        return text[_TRACE_ID], text[_SPAN_ID]

    @property
    def id_numbers(self) -> tuple[int, int]:
        """Trace id and span id. The context must be valid."""
        trace_id, span_id = self.id_digits
        return int(trace_id, 16), int(span_id, 16)

    @property
    def log_ids(self) -> dict[str, str]:
        """Fields of the request's log lines, by OpenTelemetry's names.

        https://opentelemetry.io/docs/specs/otel/compatibility/logging_trace_context/
        """
        if not self.is_valid:
            return {}
        return dict(zip(("trace_id", "span_id"), self.id_digits, strict=True))

    @property
    def span_context(self) -> SpanContext:
        """The context as OpenTelemetry's class."""
        if not self.is_valid:
            return INVALID_SPAN_CONTEXT
        flags = TraceFlags(int(self.traceparent[_FLAGS], 16))
        state = TraceState.from_header([self.tracestate]) if self.tracestate else None
        return SpanContext(*self.id_numbers, True, flags, state)


def first_context(trace_id: int, span_id: int, *, sampled: bool) -> TraceContext:
    """Return the context of a trace's first span. Ids have 128 and 64 bits, not all 0."""
    return TraceContext(f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}")


def is_sampled(traceparent: str) -> bool:
    """Return whether a traceparent's sampled flag is set, without parsing the rest."""
    return traceparent[_FLAGS] in _SAMPLED
