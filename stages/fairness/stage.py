"""The fairness stage's shell."""

from __future__ import annotations

from typing import ClassVar

from ...bus.links import DISPATCH
from ...bus.messages import AdmittedRequest, Cancel, Credit, Envelope, UpdateFairness
from ...telemetry import TraceContext, instruments, names, now_ns
from ..actor import Actor, StageContext, budget_of, deadline_of
from .core import Dispatched, FairnessCore


class FairnessStage(Actor):
    """Queues what admission lets in; dispatches as batching gives credits."""

    name: ClassVar[str] = "fairness"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._settings = self.config.fairness
        self._core = FairnessCore(self._settings)

    async def reset(self) -> None:
        self._core = FairnessCore(self._settings)

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case AdmittedRequest() as request:
                now = now_ns()
                self._core.push(request, now, deadline_of(envelope, now))
            case Credit(sequences):
                self._core.credits += sequences
            case Cancel() as cancel:
                await self.send(DISPATCH, self._core.cancel(cancel))
            case UpdateFairness(config):
                self._settings = config
                self._core.update(config)
                self.log.info("fairness_updated", aging_s=config.aging_s)
            case other:
                self.log.warning("message_not_understood", type=type(other).__name__)

    async def settle(self) -> None:
        for cancel in self._core.expire(now_ns()):
            await self.send(DISPATCH, cancel)
        while (dispatched := self._core.pop(now_ns())) is not None:
            await self._send(dispatched)

    def wake_at_ns(self) -> int | None:
        return self._core.next_deadline_ns()

    def load(self) -> dict[str, int | float | str]:
        return {"queued": self._core.num_queued, "credits": self._core.credits}

    async def measure(self) -> None:
        self.metrics.record(instruments.QUEUE_DEPTH, self._core.num_queued)

    async def _send(self, dispatched: Dispatched) -> None:
        info = dispatched.dispatch.info
        trace = TraceContext(info.traceparent, info.tracestate)
        if dispatched.last:
            waited_s = (now_ns() - dispatched.arrived_ns) / 1e9
            self.metrics.record(instruments.QUEUE_WAIT, waited_s)
            self.span(
                info.request_id,
                trace,
                dispatched.arrived_ns,
                {names.PRIORITY: dispatched.dispatch.priority},
            )
        budget = budget_of(dispatched.deadline_ns, now_ns())
        await self.send(DISPATCH, dispatched.dispatch, trace=trace, budget_ns=budget)
