"""W3C trace contexts, kept as the text in which they travel.

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
    """A trace context: the two headers, as strings.

    It is taken apart only where its ids are looked at: most are just passed on.
    """

    __slots__ = ("traceparent", "tracestate")

    def __init__(self, traceparent: str = "", tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate

    def child(self, span_id: int) -> TraceContext:
        """The same trace, recorded, one span further; only of a context that is known to be valid.

        Args:
            span_id: 64 bits, not all of them 0.
        """
        return TraceContext(f"00-{self.traceparent[_TRACE_ID]}-{span_id:016x}-01", self.tracestate)

    @property
    def is_valid(self) -> bool:
        """Whether the traceparent is one, by the specification."""
        match = _TRACEPARENT.fullmatch(self.traceparent)
        # Version 00 ends behind the flags; later ones may go on.
        return match is not None and (match[4] is None or match[1] != "00")

    @property
    def sampled(self) -> bool:
        """Whether its beginner wants it recorded; told from two digits, which is quick."""
        return self.traceparent[_FLAGS] in _SAMPLED

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" when there is no valid context."""
        return self.traceparent[_TRACE_ID] if self.is_valid else ""

    @property
    def span_id(self) -> str:
        """16 hex digits, or "" when there is no valid context."""
        return self.traceparent[_SPAN_ID] if self.is_valid else ""

    @property
    def id_digits(self) -> tuple[str, str]:
        """Trace id and span id, 32 and 16 hex digits; only of a context that is known to be
        valid."""
        text = self.traceparent
        return text[_TRACE_ID], text[_SPAN_ID]

    @property
    def id_numbers(self) -> tuple[int, int]:
        """Trace id and span id; only of a context that is known to be valid."""
        text = self.traceparent
        return int(text[_TRACE_ID], 16), int(text[_SPAN_ID], 16)

    @property
    def state(self) -> TraceState | None:
        """The tracestate as OpenTelemetry has it."""
        return TraceState.from_header([self.tracestate]) if self.tracestate else None

    @property
    def log_ids(self) -> dict[str, str]:
        """What log lines of the request carry, by the names that OpenTelemetry gives them.

        https://opentelemetry.io/docs/specs/otel/compatibility/logging_trace_context/
        """
        if not self.is_valid:
            return {}
        return {
            "trace_id": self.traceparent[_TRACE_ID],
            "span_id": self.traceparent[_SPAN_ID],
        }

    @property
    def span_context(self) -> SpanContext:
        """As OpenTelemetry has it; not valid when there is no valid context."""
        if not self.is_valid:
            return INVALID_SPAN_CONTEXT
        flags = TraceFlags(int(self.traceparent[_FLAGS], 16))
        return SpanContext(*self.id_numbers, True, flags, self.state)


def first_context(trace_id: int, span_id: int, *, sampled: bool) -> TraceContext:
    """That of a trace's first span. Ids are of 128 and 64 bits, not all of them 0."""
    return TraceContext(f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}")


def is_sampled(traceparent: str) -> bool:
    """As `TraceContext.sampled`, for who has only the text and may need no more than that."""
    return traceparent[_FLAGS] in _SAMPLED
