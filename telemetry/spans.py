"""Finished spans: cheap to make, and readable for OpenTelemetry's exporters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .context import TraceContext

Attributes = Mapping[str, str | int | float | Sequence[str]]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

SCOPE = InstrumentationScope("nano_inference")


class FinishedSpan(ReadableSpan):
    """A span that is made in one go, when all of it is known.

    The SDK's own spans are made to be changed by several threads while they last, which costs ten
    times as much. This one keeps what it was given, as it was given, and that is what our encoders
    read. Other exporters find a ReadableSpan: what they look at is made when the first of it is
    looked at.
    """

    __slots__ = (
        *("given", "began_ns", "ended_ns", "error", "ids", "linked", "moments", "origin", "own"),
        *("title", "within"),
    )

    def __init__(
        self,
        title: str,
        own: TraceContext,
        within: TraceContext | None,
        began_ns: int,
        ended_ns: int,
        given: Attributes,
        moments: Sequence[tuple[str, int]],
        linked: Sequence[TraceContext],
        error: str,
        origin: Resource,
    ) -> None:
        """Args:
        title: Its name.
        own: Its ids, valid.
        within: Its parent's ids, valid; None for the first of a trace.
        given: Its attributes; not to be changed any more.
        moments: Its events: names and timestamps.
        linked: Other traces that belong to it; all valid.
        error: What its status says; "" when all went well.
        origin: The process that it comes from.
        """
        self.ids: SpanContext | None = None
        self.title = title
        self.own = own
        self.within = within
        self.began_ns = began_ns
        self.ended_ns = ended_ns
        self.given = given
        self.moments = moments
        self.linked = linked
        self.error = error
        self.origin = origin

    def __getattr__(self, name: str) -> Any:
        """What the base class keeps: filled in when any of it is missed."""
        if "_context" in vars(self):
            raise AttributeError(f"a span has no {name!r}")
        super().__init__(
            name=self.title,
            context=self.context,
            parent=self.within.span_context if self.within is not None else None,
            resource=self.origin,
            attributes=self.given,
            events=[Event(name, timestamp=at_ns) for name, at_ns in self.moments],
            links=[Link(each.span_context) for each in self.linked],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, self.error) if self.error else Status(),
            start_time=self.began_ns,
            end_time=self.ended_ns,
            instrumentation_scope=SCOPE,
        )
        return getattr(self, name)

    @property
    def context(self) -> SpanContext:
        """Asked for by every processor, so it needs none of the rest."""
        if self.ids is None:
            self.ids = SpanContext(*self.own.id_numbers, False, _SAMPLED, self.own.state)
        return self.ids
