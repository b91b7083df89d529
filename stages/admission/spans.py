"""First spans of traces that a killed admission has taken with it."""

from __future__ import annotations

from ...bus.public import Completion
from ...config import BusError
from ...telemetry import Attributes, TraceContext, names
from ..actor import Actor

LOST_S = 10.0
"""What ended longer before the last request has its spans exported: ten times the interval."""


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
