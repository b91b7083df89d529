"""The executor stage's reports: a span for each stay of a request in the batch, with its parts, and
counts of drafts, since the last report and of the last thousand.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress

from ...bus.messages import RequestInfo
from ...bus.parts.speculation import DraftsResult, VerifiedDraft
from ...bus.steps import NewSequence, StepPlan, StepResult
from ...config import Constraint
from ...telemetry import Labels, TraceContext, instruments, is_sampled, names, now_ns
from ...text.grammar import kind_of
from ..actor import Actor


@dataclass(slots=True)
class Execution:
    """A request's stay in the batch; after a preemption there is another one.

    Attributes:
        open: Its sequences in the batch.
        leaving: Its sequences that leave with their first token.
    """

    info: RequestInfo
    constraint: Constraint | None
    start_ns: int
    resumed: bool = False
    first_token_ns: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    open: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)


class ExecutorSpans:
    """Tracks the sequences of sampled requests.

    No Python code runs per row of a step: built-in types count and search the rows, and only while
    a request in the batch is sampled.
    """

    def __init__(self, stage: Actor) -> None:
        self._stage = stage
        self._num_ranks = stage.config.engine.num_ranks
        self._of_sequence: dict[int, Execution] = {}
        self._of_request: dict[str, Execution] = {}
        # Tokens of every sequence in the batch; sampled sequences without a token.
        self._tokens: Counter[int] = Counter()
        self._without_token: set[int] = set()

    def clear(self) -> None:
        """Begin an epoch. The requests in the batch return in another slice."""
        for seq_id in list(self._of_sequence):
            self._close(seq_id, now_ns())

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """Handle the end of a step: ended sequences before new ones."""
        for seq_id in plan.finished if self._of_sequence else ():
            self._close(seq_id, result.start_ns)
        for new in plan.new:
            if is_sampled(new.info.traceparent):
                self._open(new, result.start_ns)
        if not self._of_sequence:
            return
        self._tokens.update(result.seq_ids)
        drafts = DraftsResult.find(result.parts)
        for draft in drafts.verified if drafts is not None else ():
            if (drafted := self._of_sequence.get(draft.seq_id)) is not None:
                drafted.drafted += draft.num_tokens
                drafted.accepted += draft.num_accepted
        if self._without_token:
            for seq_id in self._without_token.intersection(result.seq_ids):
                self._without_token.discard(seq_id)
                request = self._of_sequence[seq_id]
                request.first_token_ns = request.first_token_ns or result.end_ns
                if seq_id in request.leaving:
                    self._close(seq_id, result.end_ns)
        for seq_id in compress(result.seq_ids, result.finish_reasons):
            self._close(seq_id, result.end_ns)

    def _open(self, new: NewSequence, start_ns: int) -> None:
        request = self._of_request.get(new.info.request_id)
        if request is None:
            request = Execution(new.info, new.sampling.constraint, start_ns)
            self._of_request[new.info.request_id] = request
        request.resumed |= new.num_generated > 0
        request.open.add(new.seq_id)
        if new.hands_over:
            request.leaving.add(new.seq_id)
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
        attributes: dict[str, str | int | float] = {names.SLICE_TOKENS: request.tokens}
        if request.constraint is not None:
            attributes[names.CONSTRAINT] = kind_of(request.constraint)
        if request.drafted:
            attributes[names.DRAFT_TOKENS] = request.drafted
            attributes[names.ACCEPTED_TOKENS] = request.accepted
        if self._num_ranks > 1:
            attributes[names.RANKS] = self._num_ranks
        own = stage.tracing.begin_below(trace)
        stage.span(info.request_id, trace, start, attributes, events=events, own=own)
        part = {names.STAGE: stage.name, names.REQUEST_ID: info.request_id}
        stage.tracing.span("prefill", own, start, first_token or end_ns, part)
        if first_token:
            stage.tracing.span("decode", own, first_token, end_ns, part)


# --- counts of drafts -------------------------------------------------------------------------

_LAST = 1000
"""Drafts that `load` reports."""


class DraftCounts:
    """Counts drafts of results, with one addition per draft."""

    def __init__(self, sources: Iterable[str]) -> None:
        """`sources`: the names of all sources."""
        self._sources = tuple(sources)
        # By source: (tokens, accepted tokens) of drafts.
        self._new: dict[str, Counter[tuple[int, int]]] = self._nothing()
        self._last: deque[tuple[int, int]] = deque(maxlen=_LAST)

    def add(self, drafts: Iterable[VerifiedDraft]) -> None:
        """Count drafts."""
        for draft in drafts:
            became = draft.num_tokens, draft.num_accepted
            self._new.setdefault(draft.source, Counter())[became] += 1
            self._last.append(became)

    def take(self) -> Iterator[tuple[instruments.Instrument, int, Labels]]:
        """Iterate over the measurements of each source since the last call."""
        new, self._new = self._new, self._nothing()
        for source, found in new.items():
            labels = {names.DRAFT_SOURCE: source}
            yield instruments.DRAFTS, found.total(), labels
            tokens = sum(tokens * number for (tokens, _), number in found.items())
            yield instruments.DRAFT_TOKENS, tokens, labels
            accepted = sum(accepted * number for (_, accepted), number in found.items())
            yield instruments.ACCEPTED_TOKENS, accepted, labels
            longest = max((accepted for _, accepted in found), default=0)
            for position in range(max(longest, 1)):
                there = sum(number for (_, far), number in found.items() if far > position)
                at = labels | {names.DRAFT_POSITION: str(position)}
                yield instruments.ACCEPTED_TOKENS_PER_POS, there, at

    def load(self) -> dict[str, int]:
        """Return drafts, tokens and accepted tokens of the last thousand drafts."""
        return {
            "drafts": len(self._last),
            "draft_tokens": sum(tokens for tokens, _ in self._last),
            "accepted_tokens": sum(accepted for _, accepted in self._last),
        }

    def _nothing(self) -> dict[str, Counter[tuple[int, int]]]:
        return {source: Counter() for source in self._sources}
