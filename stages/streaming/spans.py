"""The streaming stage's spans."""

from __future__ import annotations

from ...telemetry import TraceContext, names
from ..actor import Actor
from .core import EndedRequest
from .measures import operation_of


def trace_end(stage: Actor, ended: EndedRequest) -> None:
    """The span of a request whose terminal message was made."""
    info, completion = ended.info, ended.completion
    if info is None or not stage.records(info.traceparent):
        return
    timings = completion.timings
    held = timings.of(stage.name)
    events: tuple[tuple[str, int], ...] = ()
    if timings.first_token_ns:
        events = ((names.FIRST_TOKEN, timings.first_token_ns),)
    if completion.status == "cancelled":
        events += ((names.CANCELLED, timings.finished_ns),)
    stage.span(
        info.request_id,
        TraceContext(info.traceparent, info.tracestate),
        held.start_ns if held else timings.finished_ns,
        {
            names.OPERATION: operation_of(info),
            names.REQUEST_MODEL: info.model,
            names.STATUS: completion.status,
            names.INPUT_TOKENS: completion.usage.prompt_tokens,
            names.CACHED_TOKENS: completion.usage.cached_tokens,
            names.OUTPUT_TOKENS: completion.usage.completion_tokens,
            names.FINISH_REASONS: tuple(sample.finish_reason for sample in completion.samples),
        },
        events=events,
        error=completion.error.code if completion.error else "",
    )
