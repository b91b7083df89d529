"""The executor stage's spans: one for each time that a request is in the batch, with its parts."""

from __future__ import annotations

from collections import Counter
from itertools import compress

from ...bus.messages import NewSequence, RequestInfo, StepPlan, StepResult
from ...config import Constraint
from ...telemetry import TraceContext, is_sampled, names, now_ns
from ...text.grammar import kind_of
from ..actor import Actor


class Execution:
    """A request's stay in the executor; after a preemption it has another one."""

    __slots__ = (
        "accepted",
        "constraint",
        "drafted",
        "first_token_ns",
        "info",
        "open",
        "resumed",
        "start_ns",
        "tokens",
    )

    def __init__(self, info: RequestInfo, constraint: Constraint | None, start_ns: int) -> None:
        self.info = info
        self.constraint = constraint
        self.start_ns = start_ns
        self.resumed = False
        self.first_token_ns = 0
        self.tokens = 0
        self.drafted = self.accepted = 0
        # Its sequences that are in the batch.
        self.open: set[int] = set()


class ExecutorSpans:
    """Follows the sequences of requests that are recorded.

    No Python runs for each row of a step: rows are counted and searched by what is built in, and
    only while any request in the batch is recorded.
    """

    def __init__(self, stage: Actor) -> None:
        self._stage = stage
        self._of_sequence: dict[int, Execution] = {}
        self._of_request: dict[str, Execution] = {}
        # Tokens so far of every sequence in the batch, and of whom the first one is looked for.
        self._tokens: Counter[int] = Counter()
        self._without_token: set[int] = set()

    def clear(self) -> None:
        """A new epoch. What is in the batch goes on in another slice, when it is sent again."""
        for seq_id in list(self._of_sequence):
            self._close(seq_id, now_ns())

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """A plan was carried out; what it ended comes before what it began."""
        for seq_id in plan.finished if self._of_sequence else ():
            self._close(seq_id, result.start_ns)
        for new in plan.new:
            if is_sampled(new.info.traceparent):
                self._open(new, result.start_ns)
        if not self._of_sequence:
            return
        self._tokens.update(result.seq_ids)
        for draft in result.drafts:
            if (drafted := self._of_sequence.get(draft.seq_id)) is not None:
                drafted.drafted += draft.num_tokens
                drafted.accepted += draft.num_accepted
        if self._without_token:
            for seq_id in self._without_token.intersection(result.seq_ids):
                self._without_token.discard(seq_id)
                request = self._of_sequence[seq_id]
                request.first_token_ns = request.first_token_ns or result.end_ns
        for seq_id in compress(result.seq_ids, result.finish_reasons):
            self._close(seq_id, result.end_ns)

    def _open(self, new: NewSequence, start_ns: int) -> None:
        request = self._of_request.get(new.info.request_id)
        if request is None:
            request = Execution(new.info, new.sampling.constraint, start_ns)
            self._of_request[new.info.request_id] = request
        request.resumed |= new.num_generated > 0
        request.open.add(new.seq_id)
        self._of_sequence[new.seq_id] = request
        self._without_token.add(new.seq_id)

    def _close(self, seq_id: int, end_ns: int) -> None:
        tokens = self._tokens.pop(seq_id, 0)
        request = self._of_sequence.pop(seq_id, None)
        if request is None:
            return
        self._without_token.discard(seq_id)
        request.tokens += tokens
        request.open.discard(seq_id)
        if not request.open:
            del self._of_request[request.info.request_id]
            self._make(request, end_ns)
        if not self._of_sequence:
            self._tokens.clear()

    def _make(self, request: Execution, end_ns: int) -> None:
        info, start, first_token = request.info, request.start_ns, request.first_token_ns
        events: tuple[tuple[str, int], ...] = ((names.RESUMED, start),) if request.resumed else ()
        if first_token:
            events += ((names.FIRST_TOKEN, first_token),)
        stage = self._stage
        trace = TraceContext(info.traceparent, info.tracestate)
        attributes: dict[str, str | int | float] = {names.OUTPUT_TOKENS: request.tokens}
        if request.constraint is not None:
            attributes[names.CONSTRAINT] = kind_of(request.constraint)
        if request.drafted:
            attributes[names.DRAFT_TOKENS] = request.drafted
            attributes[names.ACCEPTED_TOKENS] = request.accepted
        own = stage.tracing.begin_below(trace)
        stage.span(info.request_id, trace, start, attributes, events=events, own=own)
        part = {names.STAGE: stage.name, names.REQUEST_ID: info.request_id}
        stage.tracing.span("prefill", own, start, first_token or end_ns, part)
        if first_token:
            stage.tracing.span("decode", own, first_token, end_ns, part)
