"""The batching stage's spans: of requests that wait for their next step, and of steps."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ...bus.messages import Handover, RequestInfo
from ...bus.parts.speculation import DraftsResult
from ...bus.parts.tiers import FetchedBlocks, moves_of
from ...bus.steps import NewSequence, StepPlan, StepSummary
from ...telemetry import TraceContext, names, now_ns
from ..actor import Actor
from .core import BatchingCore

_MOVES: dict[str, str] = {
    "store": names.KV_BLOCKS_STORED,
    "load": names.KV_BLOCKS_LOADED,
    "fetch": names.KV_BLOCKS_FETCHED,
    "offer": names.KV_BLOCKS_OFFERED,
}


class Wait(NamedTuple):
    """A waiting request; `preempted`: it gave up its blocks to others."""

    info: RequestInfo
    since_ns: int
    preempted: bool = False


class StepSpan(NamedTuple):
    """The span of a plan in flight.

    Attributes:
        made_ns: When the plan was made.
        requests: Traceparents of its requests that are recorded.
        attributes: Attributes of the span.
    """

    made_ns: int
    requests: list[str]
    attributes: dict[str, int]


class BatchingSpans:
    """A span for each time that a recorded request waits here, and spans of some steps.

    A step's span begins a trace of its own, linked to the recorded requests in the step. Their rate
    is at most `telemetry.steps_per_s`: with its links, one costs as much as many others.
    """

    def __init__(self, stage: Actor) -> None:
        self._stage = stage
        self._waiting: dict[str, Wait] = {}
        self._running: dict[int, RequestInfo] = {}  # of recorded requests
        self._steps: dict[int, StepSpan] = {}
        rate = stage.config.telemetry.steps_per_s
        self._pause_ns = int(1e9 / rate) if rate else 0
        self._next_step_ns = 0

    def clear(self) -> None:
        """Forget all requests and steps: a new epoch begins."""
        self._waiting.clear()
        self._running.clear()
        self._steps.clear()

    def arrived(self, info: RequestInfo, now: int) -> None:
        """Note that sequences of a request have come."""
        if self._stage.records(info.traceparent):
            self._waiting.setdefault(info.request_id, Wait(info, now))

    def handed_over(self, info: RequestInfo, handover: Handover, giver: str, now: int) -> None:
        """Record the way of a first token from another replica, by the clocks of both."""
        self.arrived(info, now)
        if self._stage.records(info.traceparent):
            trace = TraceContext(info.traceparent, info.tracestate)
            by = {names.HANDED_OVER_BY: giver}
            self._stage.span(
                info.request_id, trace, min(handover.sampled_ns, now), by, name=names.HANDOVER
            )

    def ended(self, request_id: str) -> None:
        """Note that a request was cut short."""
        self._waiting.pop(request_id, None)

    def planned(self, plan: StepPlan, core: BatchingCore) -> None:
        """Note a plan: sequences that it starts stop waiting, preempted ones wait again."""
        if not self._stage.tracing.enabled:
            return
        for cancel in plan.ended:
            self.ended(cancel.request_id)
        for seq_id in plan.finished if self._running else ():
            info = self._running.pop(seq_id, None)
            if info is not None and seq_id in core.index:  # it has not ended
                self._waiting.setdefault(info.request_id, Wait(info, now_ns(), preempted=True))
        for new in plan.new:
            if self._stage.records(new.info.traceparent):
                self._running[new.seq_id] = new.info
                if (wait := self._waiting.pop(new.info.request_id, None)) is not None:
                    self._started(wait)
                if (fetched := FetchedBlocks.find(new.onward)) is not None:
                    self._fetched(new, fetched)
        if self._running and self._pause_ns and plan.made_ns >= self._next_step_ns:
            self._note(plan, core)

    def step_done(self, result: StepSummary) -> None:
        """Note a result; record the span of its step."""
        if self._running:
            for seq_id in result.ended:
                self._running.pop(seq_id, None)
        step = self._steps.pop(result.step_id, None)
        if step is None:
            return
        device_time_s = (result.end_ns - result.start_ns) / 1e9
        self._stage.tracing.span(
            "step",
            TraceContext(),
            step.made_ns,
            now_ns(),
            {
                names.STAGE: self._stage.name,
                **self._stage.labels,
                names.EPOCH: self._stage.epoch,
                names.DEVICE_TIME_S: device_time_s,
                **step.attributes,
                **_draft_counts(result),
            },
            links=step.requests,
            own=self._stage.tracing.begin(sampled=True),
        )

    def _started(self, wait: Wait) -> None:
        info = wait.info
        events: tuple[tuple[str, int], ...] = ()
        if wait.preempted:
            events = ((names.PREEMPTED, wait.since_ns), (names.RESUMED, now_ns()))
        trace = TraceContext(info.traceparent, info.tracestate)
        self._stage.span(info.request_id, trace, wait.since_ns, events=events)

    def _fetched(self, new: NewSequence, fetched: FetchedBlocks) -> None:
        """Record the wait of a sequence for blocks from disk or another executor."""
        trace, since_ns = TraceContext(new.info.traceparent, new.info.tracestate), fetched.since_ns
        attributes = {
            names.SAMPLE_INDEX: new.sample.sample_index,
            names.KV_BLOCKS_LOADED: fetched.num_loaded,
        }
        self._stage.span(new.info.request_id, trace, since_ns, attributes, name=names.KV_FETCH)

    def _note(self, plan: StepPlan, core: BatchingCore) -> None:
        infos = filter(None, map(self._running.get, plan.seq_ids))
        requests = list(dict.fromkeys(info.traceparent for info in infos))
        if not requests:
            return
        self._next_step_ns = plan.made_ns + self._pause_ns
        # The last token of a prompt that is cached is computed like a generated one.
        decode = plan.num_tokens.count(1)
        attributes = {
            names.STEP_ID: plan.step_id,
            names.BATCH_SIZE: len(plan.seq_ids),
            names.PREFILL_TOKENS: sum(plan.num_tokens) - decode,
            names.DECODE_TOKENS: decode,
            names.BLOCKS_FREE: core.cache.num_free_blocks(),
            **_moves(plan),
        }
        self._steps[plan.step_id] = StepSpan(plan.made_ns, requests, attributes)


def _moves(plan: StepPlan) -> dict[str, int]:
    """Return the numbers of blocks that a plan moves between the tiers, if it moves any."""
    kinds: Counter[str] = Counter(move.kind for move in moves_of(plan.parts))
    return {name: kinds[kind] for kind, name in _MOVES.items() if kinds[kind]}


def _draft_counts(result: StepSummary) -> dict[str, int]:
    """Return the number of drafted tokens and of accepted ones, if there are any."""
    found = DraftsResult.find(result.parts)
    if found is None or not found.verified:
        return {}
    return {
        names.DRAFT_TOKENS: sum(draft.num_tokens for draft in found.verified),
        names.ACCEPTED_TOKENS: sum(draft.num_accepted for draft in found.verified),
    }
