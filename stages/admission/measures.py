"""Metrics and spans of admission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...bus.control import Cancel
from ...bus.entries import RequestEntry, entry_key
from ...bus.messages import AdmittedRequest, RequestOpened
from ...bus.parts.images import PromptMedia
from ...bus.public import Completion, GenerateRequest
from ...bus.recovery import RecoveredSample
from ...config import BusError, Constraint, NanoInferenceError
from ...telemetry import Attributes, TraceContext, instruments, names, now_ns
from ...text.grammar import kind_of
from ..actor import Actor
from .checks import request_id_of


def count_constraint(stage: Actor, entry: RequestEntry, error: str = "") -> None:
    """Count an entry with a constraint: accepted, or refused with an error code."""
    request = entry.request
    if isinstance(request, GenerateRequest) and request.sampling.constraint is not None:
        labels = {names.CONSTRAINT: kind_of(request.sampling.constraint), names.ERROR_TYPE: error}
        stage.metrics.record(instruments.CONSTRAINTS, 1, labels)


def count_moe(stage: Actor, model: str, number: int) -> None:
    """Count accepted requests of a model with experts."""
    stage.metrics.record(instruments.MOE_REQUESTS, number, {names.REQUEST_MODEL: model})


def count_fork(stage: Actor, found: object, number: int = 1) -> None:
    """Count a fork: its prompt was found, or the error that refuses it."""
    code = getattr(found, "code", "internal_error") if isinstance(found, Exception) else ""
    stage.metrics.record(instruments.FORKS, number, {names.ERROR_TYPE: code})


@contextmanager
def compiling(stage: Actor, constraint: Constraint) -> Iterator[None]:
    """Measure the compilation of a constraint in any thread."""
    start_ns = now_ns()
    try:
        yield
    finally:
        labels = {names.CONSTRAINT: kind_of(constraint)}
        stage.metrics.record(instruments.CONSTRAINT_COMPILE, (now_ns() - start_ns) / 1e9, labels)


def count_images(stage: Actor, number: int, seconds: float, error: str = "") -> None:
    """Count images that were decoded, or whose request was refused, and the time."""
    labels = {names.ERROR_TYPE: error}
    stage.metrics.record(instruments.IMAGES, number, labels)
    stage.metrics.record(instruments.IMAGE_TIME, seconds)


@contextmanager
def preparing_images(stage: Actor, request: GenerateRequest) -> Iterator[None]:
    """Count a request's images, and measure their decoding, in any thread."""
    start_ns, error = now_ns(), ""
    try:
        yield
    except NanoInferenceError as refusal:
        error = refusal.code
        raise
    finally:
        count_images(stage, len(request.images), (now_ns() - start_ns) / 1e9, error)


LOST_S = 10.0
"""Spans of requests that ended earlier than this are exported: ten times the interval."""


class EntryTrace:
    """The span of an entry.

    Attributes:
        context: For the other stages' spans. They are siblings below the client's span, or below
            this one without a client's.
    """

    def __init__(self, stage: Actor, entry: RequestEntry, received_ns: int) -> None:
        self._stage, self._entry, self.received_ns = stage, entry, received_ns
        self._parent = TraceContext(entry.traceparent, entry.tracestate)
        self._own: TraceContext | None = None
        if not self._parent.is_valid:
            self._parent = TraceContext()
            self._own = stage.first_context(entry.key)
        self.context = self._own or self._parent

    def end(
        self,
        opened: RequestOpened | None = None,
        admitted: AdmittedRequest | None = None,
        error: str = "",
    ) -> None:
        """Make the span, of a request or of an error."""
        if not self._stage.records(self.context.traceparent):
            return
        attributes: dict[str, str | int | float] = {names.MESSAGE_ID: self._entry.entry_id}
        if opened is not None and admitted is not None:
            attributes |= {
                names.INPUT_TOKENS: len(opened.prompt_token_ids),
                names.SAMPLES: opened.n,
                names.TENANT: admitted.tenant,
                names.PRIORITY: admitted.priority,
            }
            if admitted.sampling.constraint is not None:
                attributes[names.CONSTRAINT] = kind_of(admitted.sampling.constraint)
            if (media := PromptMedia.find(admitted.parts)) is not None:
                attributes[names.IMAGES] = len(media.items)
        if (origin := self._entry.origin) is not None:
            attributes |= {names.FORK_OF: origin.request_id, names.FORK_AT: origin.at}
        self._stage.span(
            request_id_of(self._entry),
            self._parent,
            self.received_ns,
            attributes,
            error=error,
            own=self._own,
            links=(self._entry.origin_trace,) if self._entry.origin_trace else (),
        )


def trace_replay(
    stage: Actor,
    request_id: str,
    trace: TraceContext,
    down_since_ns: int,
    samples: Sequence[RecoveredSample],
) -> None:
    """Record the span from a failure to the request's resumption."""
    attributes: Attributes = {names.KEPT_TOKENS: sum(len(sample.token_ids) for sample in samples)}
    events = ((names.REPLAYED, now_ns()),)
    stage.span(request_id, trace, down_since_ns, attributes, name="replay", events=events)


def trace_cancel(stage: Actor, trace: TraceContext, cancel: Cancel) -> None:
    """Record the span of a cancellation: perhaps no other stage has a span of the request."""
    now = now_ns()
    events = ((names.CANCELLED, now),) if cancel.status == "cancelled" else ()
    stage.span(cancel.request_id, trace, now, name="cancel", error=cancel.code, events=events)


async def trace_first_again(stage: Actor) -> None:
    """Repeat the first spans of requests that ended recently.

    A trace's first span is admission's, unless the client made one. If admission is killed before
    it has exported the span, spans of other processes have no parent. A successor repeats it for
    requests in flight, and here for ended ones from their terminal messages. If nothing was lost,
    the span comes twice with the same ids.
    """
    if not stage.tracing.enabled:
        return
    try:
        async for completion in stage.bus.results.newest(LOST_S):
            _trace_first(stage, completion)
    except BusError as error:
        stage.log.warning("first_spans_not_made_again", reason=str(error))


def _trace_first(stage: Actor, completion: Completion) -> None:
    held = completion.timings.of(stage.name)
    own = stage.first_context(entry_key(completion.entry_id, completion.request_id))
    if held is None or own.trace_id != completion.trace_id:
        return  # refused, so there is no other span; or the client's span is the first
    attributes: Attributes = {
        names.STAGE: stage.name,
        names.REQUEST_ID: completion.request_id,
        names.MESSAGE_ID: completion.entry_id,
        names.INPUT_TOKENS: completion.usage.prompt_tokens,
        names.SAMPLES: len(completion.samples),
    }
    stage.tracing.span(stage.name, TraceContext(), held.start_ns, held.end_ns, attributes, own=own)
