"""Spans, metrics, log lines and the progress of batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...config.logger import get_logger
from ...store.batches import BatchProgress, BatchState, SegmentResult, StoredBatch
from ...telemetry import TraceContext, instruments, names
from ..call import Call
from ..server.measures import Measures

_LOOKS = 15
"""Looks at a batch over which its rate is measured."""

_S = 1_000_000_000


@dataclass(eq=False)
class ObservedBatches:
    """The batches that this gateway runs, for operators.

    A line's call has a trace of its own, which is found by the batch's id: a trace of all lines
    could not be shown. The batch has a span, too, made by the gateway that ends it.

    Attributes:
        unfinished: Unfinished batches of all gateways.
    """

    measures: Measures
    unfinished: int = 0
    _seen: dict[str, BatchProgress] = field(default_factory=dict)
    _looks: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        watch = self.measures.watch
        watch(instruments.BATCHES, lambda: self.unfinished)
        watch(instruments.BATCH_OPEN_LINES, lambda: sum(each.open for each in self._seen.values()))
        watch(instruments.BATCH_OLDEST, self._oldest_s)
        for outcome in SegmentResult.OUTCOMES:
            self._count(outcome, 0)

    def seen(self, stored: StoredBatch) -> BatchProgress:
        """Note a batch as it was read; return its progress."""
        state, ended = stored.state, stored.completed + stored.failed
        looks = self._looks.setdefault(state.id, deque(maxlen=_LOOKS))
        looks.append((time.monotonic(), ended))
        (began_s, before), (now_s, _) = looks[0], looks[-1]
        found = BatchProgress(
            id=state.id,
            tenant=state.tenant,
            endpoint=state.endpoint,
            status=state.status,
            created_s=state.created_s,
            total=state.total,
            completed=stored.completed,
            failed=stored.failed,
            lines_per_s=max(0, ended - before) / (now_s - began_s) if now_s > began_s else 0.0,
            seen_s=int(time.time()),
        )
        self._seen[state.id] = found
        return found

    def left(self, batch_id: str) -> None:
        """Forget a batch that this gateway no longer runs."""
        self._seen.pop(batch_id, None)
        self._looks.pop(batch_id, None)

    def recorded(self, result: SegmentResult) -> None:
        """Count the lines of a segment's result."""
        for outcome in SegmentResult.OUTCOMES:
            if number := getattr(result, outcome):
                self._count(outcome, number)

    def began(self, state: BatchState) -> None:
        """Log a batch whose lines run from now on, or that can't run."""
        get_logger().info(
            "batch_begun" if state.status == "in_progress" else "batch_refused",
            batch=state.id,
            tenant=state.tenant,
            endpoint=state.endpoint,
            lines=state.total,
            **({"code": state.faults[0].code} if state.faults else {}),
        )

    def ended(self, state: BatchState, counts: SegmentResult) -> None:
        """Log a batch that this gateway has ended, and make its span."""
        lines = {name: getattr(counts, name) for name in SegmentResult.OUTCOMES}
        get_logger().info(
            "batch_ended",
            batch=state.id,
            tenant=state.tenant,
            status=state.status,
            lines=state.total,
            **{name: number for name, number in lines.items() if number},
            duration_s=state.ended_s - state.created_s,
        )
        attributes = {
            names.BATCH_ID: state.id,
            names.TENANT: state.tenant,
            names.STATUS: state.status,
            names.URL_PATH: state.endpoint,
            names.BATCH_LINES: state.total,
            **{f"{names.BATCH_LINES}.{name}": number for name, number in lines.items()},
        }
        self.measures.tracing.span(
            "batch", TraceContext(), state.created_s * _S, state.ended_s * _S, attributes
        )

    @contextmanager
    def line(self, state: BatchState, call: Call, number: int) -> Iterator[None]:
        """Open while a line's call is in flight; it gets its trace."""
        tracing = self.measures.tracing
        if not tracing.enabled:
            yield
            return
        call.trace = tracing.begin()
        began_ns = time.time_ns()
        try:
            yield
        finally:
            operation, code = call.account.operation, call.code or call.account.code
            attributes = {
                names.BATCH_ID: state.id,
                names.BATCH_LINE: number,
                **(operation.attributes if operation is not None else {}),
                **names.time_attributes(call.account.time, call.account.billed_ns),
            }
            name = operation.span_name if operation is not None else f"POST {state.endpoint}"
            ended_ns = time.time_ns()
            tracing.span(
                name, TraceContext(), began_ns, ended_ns, attributes, error=code, own=call.trace
            )

    def _count(self, outcome: str, number: int) -> None:
        labels = {names.BATCH_OUTCOME: outcome}
        self.measures.metrics.record(instruments.BATCH_LINES, number, labels)

    def _oldest_s(self) -> float:
        made = [each.created_s for each in self._seen.values()]
        return max(0.0, time.time() - min(made)) if made else 0.0
