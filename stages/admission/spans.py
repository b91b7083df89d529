"""Admission's spans: of entries, replays and cancellations, and those that a killed one lost."""

from __future__ import annotations

from collections.abc import Sequence

from ...bus.channel import RequestEntry
from ...bus.control import Cancel
from ...bus.messages import RecoveredSample
from ...bus.public import Completion
from ...config import BusError
from ...telemetry import Attributes, TraceContext, names, now_ns
from ...text.grammar import kind_of
from ..actor import Actor
from .checks import request_id_of
from .events import Accepted

LOST_S = 10.0
"""What ended longer before the last request has its spans exported: ten times the interval."""


def trace_entry(
    stage: Actor,
    entry: RequestEntry,
    received_ns: int,
    accepted: Accepted | None = None,
    error: str = "",
) -> TraceContext:
    """The span of an entry; returns the context for the other stages' spans.

    They are siblings below the client's span, or, if the client gave none, below ours.
    """
    given = TraceContext(entry.traceparent, entry.tracestate)
    own = None
    if not given.is_valid:
        given = TraceContext()
        own = stage.first_context(entry.entry_id)
    if not stage.records((own or given).traceparent):
        return own or given
    attributes: dict[str, str | int | float] = {names.MESSAGE_ID: entry.entry_id}
    if accepted is not None:
        opened, request = accepted
        attributes |= {
            names.REQUEST_MODEL: opened.model,
            names.INPUT_TOKENS: len(opened.prompt_token_ids),
            names.SAMPLES: opened.n,
            names.TENANT: request.tenant,
            names.PRIORITY: request.priority,
        }
        if request.sampling.constraint is not None:
            attributes[names.CONSTRAINT] = kind_of(request.sampling.constraint)
    request_id = request_id_of(entry)
    stage.span(request_id, given, received_ns, attributes, error=error, own=own)
    return own or given


def trace_replay(
    stage: Actor,
    request_id: str,
    trace: TraceContext,
    down_since_ns: int,
    samples: Sequence[RecoveredSample],
) -> None:
    """From the failure, as far as it is known here, to the request's second start."""
    attributes: Attributes = {names.KEPT_TOKENS: sum(len(sample.token_ids) for sample in samples)}
    events = ((names.REPLAYED, now_ns()),)
    stage.span(request_id, trace, down_since_ns, attributes, name="replay", events=events)


def trace_cancel(stage: Actor, trace: TraceContext, cancel: Cancel) -> None:
    """The request may be anywhere, and perhaps no other stage will have a span of it."""
    now = now_ns()
    events = ((names.CANCELLED, now),) if cancel.status == "cancelled" else ()
    stage.span(cancel.request_id, trace, now, name="cancel", error=cancel.code, events=events)


async def trace_first_again(stage: Actor) -> None:
    """Makes the first spans of the requests that ended last once more.

    The first span of a trace is admission's, unless the client made one. Should admission be killed
    before it has exported that, the spans of other processes would have a parent that never comes.
    Its successor makes it again for what is in flight; of what has ended the terminal messages are
    left, and here the span is made from those. If nothing was lost, it comes twice, with the same
    ids.
    """
    if not stage.tracing.enabled:
        return
    try:
        async for completion in stage.bus.results.newest(LOST_S):
            _trace_first(stage, completion)
    except BusError as error:
        stage.log.warning("first_spans_not_made_again", reason=error.message)


def _trace_first(stage: Actor, completion: Completion) -> None:
    held = completion.timings.of(stage.name)
    own = stage.first_context(completion.entry_id)
    if held is None or own.trace_id != completion.trace_id:
        return  # it was refused, so there is no other span; or the client's span is the first
    attributes: Attributes = {
        names.STAGE: stage.name,
        names.REQUEST_ID: completion.request_id,
        names.MESSAGE_ID: completion.entry_id,
        names.REQUEST_MODEL: completion.model,
        names.INPUT_TOKENS: completion.usage.prompt_tokens,
        names.SAMPLES: len(completion.samples),
    }
    stage.tracing.span(stage.name, TraceContext(), held.start_ns, held.end_ns, attributes, own=own)
