"""The streaming stage's spans, and those that a lost admission can't make any more."""

from __future__ import annotations

from collections import deque

from ...bus.messages import Completion, RequestInfo, StageTime
from ...telemetry import Attributes, TraceContext, names
from ..actor import Actor
from .core import EndedRequest

KEPT_NS = 10_000_000_000
"""What ended longer ago has its spans exported: twice OpenTelemetry's interval."""

MOST_KEPT = 16_384


class StreamingSpans:
    """One span for each request that ends here.

    The first span of a trace is admission's, unless the client made one. Should admission be killed
    before it has exported that, its successor makes it again, for every request that was not
    acknowledged. Those that were end here, so here they are kept for a while, and admission's span
    is made once more: otherwise the other spans could have a parent that never comes. Where both
    stages are in one process, what the one has made is not lost with the other.
    """

    def __init__(self, stage: Actor) -> None:
        self._stage = stage
        self._ended: deque[EndedRequest] = deque(maxlen=MOST_KEPT)
        self._admission = ""

    def ended(self, ended: EndedRequest) -> None:
        """A request's terminal message was made."""
        info, completion = ended.info, ended.completion
        if info is None or not self._stage.records(info.traceparent):
            return
        self._make(info, completion)
        if "admission" not in self._stage.config.pipeline.stages:
            self._keep(ended)

    def begun_by(self, admission: str) -> None:
        """An epoch was begun by this incarnation of admission."""
        before, self._admission = self._admission, admission
        if before not in ("", admission):
            for ended in self._ended:
                self._make_first(ended)
            self._ended.clear()

    def _make(self, info: RequestInfo, completion: Completion) -> None:
        timings = completion.timings
        held = _held(completion, self._stage.name)
        events: tuple[tuple[str, int], ...] = ()
        if timings.first_token_ns:
            events = ((names.FIRST_TOKEN, timings.first_token_ns),)
        if completion.status == "cancelled":
            events += ((names.CANCELLED, timings.finished_ns),)
        self._stage.span(
            info.request_id,
            TraceContext(info.traceparent, info.tracestate),
            held.start_ns if held else timings.finished_ns,
            {
                names.REQUEST_MODEL: info.model,
                names.STATUS: completion.status,
                names.INPUT_TOKENS: completion.usage.prompt_tokens,
                names.CACHED_TOKENS: completion.usage.cached_tokens,
                names.OUTPUT_TOKENS: completion.usage.completion_tokens,
                names.FINISH_REASONS: tuple(each.finish_reason for each in completion.samples),
            },
            events=events,
            error=completion.error.code if completion.error else "",
        )

    def _keep(self, ended: EndedRequest) -> None:
        """No longer than another request's end tells: while admission is gone, none ends for good,
        and however long its successor takes to come, it finds those that ended last."""
        self._ended.append(ended)
        now = ended.completion.timings.finished_ns
        while now - self._ended[0].completion.timings.finished_ns > KEPT_NS:
            self._ended.popleft()

    def _make_first(self, ended: EndedRequest) -> None:
        info, completion = ended.info, ended.completion
        held = _held(completion, "admission")
        if info is None or held is None:
            return
        own = self._stage.first_context(info.entry_id)
        if own.traceparent != info.traceparent:
            return  # the client's span is the first
        attributes: Attributes = {
            names.STAGE: held.stage,
            names.REQUEST_ID: info.request_id,
            names.MESSAGE_ID: info.entry_id,
            names.REQUEST_MODEL: info.model,
            names.INPUT_TOKENS: info.num_prompt_tokens,
            names.SAMPLES: info.n,
        }
        self._stage.tracing.span(
            held.stage, TraceContext(), held.start_ns, held.end_ns, attributes, own=own
        )


def _held(completion: Completion, stage: str) -> StageTime | None:
    return next((time for time in completion.timings.stages if time.stage == stage), None)
