"""The actor of the fairness stage."""

from __future__ import annotations

import copy
import time
from typing import ClassVar

import anyio
import msgspec

from ...bus import Inbox
from ...bus.control import Cancel, UpdateFairness, UpdateRoles
from ...bus.envelope import Envelope
from ...bus.links import DISPATCH, DispatchMessage, Link, at
from ...bus.messages import AdmittedRequest, Credit, PauseSequences, ReleaseBlocks
from ...config import (
    ConfigError,
    NanoInferenceError,
    ReplicaRole,
    check_roles,
    role_of_sender,
    split_role,
)
from ...telemetry import Attributes, TraceContext, instruments, names, now_ns, priority_label
from ..actor import Actor, StageContext, budget_of, deadline_of
from .core import FairnessCore
from .parts.exchange import Exchange
from .parts.handovers import Handovers
from .queue import Running
from .state import Counts, Dispatched

_SHOWN_TENANTS = 20


class FairnessStage(Actor):
    """Queues admitted requests, dispatches sequences for credits, and pauses running ones."""

    name: ClassVar[str] = "fairness"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        engine = self.config.engine
        self._core = FairnessCore(
            self.config.fairness,
            replicas=self.config.pipeline.replicas,
            max_draft_tokens=engine.max_draft_tokens if engine.speculation != "off" else 0,
            roles=self.config.pipeline.roles,
            lane=self.config.bus.lane,
        )
        self._handovers = self._core.part(Handovers)
        self._exchange = self._core.part(Exchange)
        # Cancellations that wait for the first replica.
        self._early: list[Cancel] = []
        self._measured = Counts()
        self._measured_service = (0.0, 0.0)
        # Set when the settings have changed.
        self._configured = anyio.Event()
        # The last exchange, or the start, on this process's clock.
        self._exchanged_s = time.monotonic()

    async def receive_forever(self, inbox: Inbox) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._exchange_forever)
            await super().receive_forever(inbox)

    async def reset(self) -> None:
        self._core.reset(self.epoch)
        self._early.clear()

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case AdmittedRequest() as request:
                now = now_ns()
                self._core.push(request, now, deadline_of(envelope, now))
            case Credit() as report:
                for running in self._core.absorb(report, now_ns(), role_of_sender(envelope.sender)):
                    self._trace_pause(running)
            case Cancel() as cancel:
                await self._pass_on(self._core.cancel(cancel))
            case UpdateFairness(config):
                self._core.configure(config)
                self._configured.set()
                self.log.info("fairness_updated", **msgspec.structs.asdict(config))
            case UpdateRoles(roles):
                await self._update_roles(roles, envelope.operation_id)
            case other:
                self.log.warning("message_not_understood", type=type(other).__name__)

    async def tick(self) -> None:
        while (dispatched := self._core.pop(now_ns())) is not None:
            await self._send(dispatched)
        asked: dict[str, list[int]] = {}
        for running in self._core.ask_to_pause(now_ns()):
            asked.setdefault(running.replica, []).append(running.spec.seq_id)
        for replica, seq_ids in asked.items():
            await self.send(_dispatch_to(replica), PauseSequences(tuple(seq_ids)))
        for replica, seq_ids in self._handovers.take_releases().items():
            await self.send(_dispatch_to(replica), ReleaseBlocks(tuple(seq_ids)))
        early, self._early = self._early, []
        for cancel in (*early, *self._core.expire(now_ns())):
            await self._pass_on(cancel)

    def wake_at_ns(self) -> int | None:
        return self._core.next_deadline_ns()

    def load(self) -> dict[str, int | float | str]:
        core, counts = self._core, self._core.counts
        return {
            "queued": core.num_queued,
            "credits": core.credits,
            "paused": core.num_paused,
            "preemptions": counts.preemptions,
            "yields": counts.yields,
            "resumes": counts.resumes,
            "handovers": counts.handovers,
            "roles": ",".join(self._handovers.roles),
            **self._service(),
            "tenants": msgspec.json.encode(core.queue.busiest_tenants(_SHOWN_TENANTS)).decode(),
            "settings": msgspec.json.encode(core.config).decode(),
        }

    async def measure(self) -> None:
        counts, before = self._core.counts, self._measured
        record = self.metrics.record
        record(instruments.QUEUE_DEPTH, self._core.num_queued)
        record(instruments.FAIRNESS_PREEMPTIONS, counts.preemptions - before.preemptions)
        record(instruments.FAIRNESS_YIELDS, counts.yields - before.yields)
        record(instruments.FAIRNESS_RESUMES, counts.resumes - before.resumes)
        record(instruments.FAIRNESS_HANDOVERS, counts.handovers - before.handovers)
        for priority, tokens in counts.tokens.items():
            labels = {names.PRIORITY: priority_label(priority)}
            record(instruments.FAIRNESS_TOKENS, tokens - before.tokens[priority], labels)
        self._measured = copy.deepcopy(counts)
        exchange, (own, elsewhere) = self._exchange, self._measured_service
        if exchange.on:
            service = instruments.FAIRNESS_SERVICE
            record(service, max(0.0, exchange.total - own), {names.SERVED_BY: "lane"})
            record(service, max(0.0, exchange.elsewhere - elsewhere), {names.SERVED_BY: "others"})
            record(instruments.FAIRNESS_EXCHANGE_AGE, self._exchange_age_s())
        self._measured_service = (exchange.total, exchange.elsewhere)

    def _service(self) -> dict[str, int | float | str]:
        exchange = self._exchange
        if not exchange.on:
            return {}
        return {
            "service": round(exchange.total),
            "service_elsewhere": round(exchange.elsewhere),
            "other_lanes": exchange.num_lanes,
            "exchange_age_s": round(self._exchange_age_s(), 1),
        }

    def _exchange_age_s(self) -> float:
        return time.monotonic() - self._exchanged_s

    async def _exchange_forever(self) -> None:
        """Publish this lane's service, and count that of the other lanes.

        At most one exchange runs at a time. If it fails, the lane is fair by the last tables that
        it has read; the tables' totals make up for it later.
        """
        reported_s = time.monotonic()
        while True:
            if not (interval_s := self._core.config.exchange_interval_s):
                self._configured = anyio.Event()
                await self._configured.wait()
                reported_s = time.monotonic()
                continue
            await anyio.sleep(interval_s)
            now_s = time.monotonic()
            own = self._exchange.report_service(now_s - reported_s)
            reported_s = now_s
            record = self.bus.store.service
            try:
                silent = self._exchange.apply_service(await record.exchange(own))
                self._exchanged_s = time.monotonic()
                await record.forget(silent)
            except NanoInferenceError as error:
                self.log.debug("service_not_exchanged", error=str(error))

    async def _update_roles(self, roles: tuple[ReplicaRole, ...], operation_id: str) -> None:
        try:
            check_roles(roles, self.config.pipeline.replicas)
        except ConfigError as error:
            await self.answer(operation_id, error=error)
            return
        self._handovers.set_roles(roles)
        self.log.info("roles_updated", roles=roles)
        await self.answer(operation_id)

    async def _pass_on(self, cancel: Cancel) -> None:
        replicas = self._core.replicas_of(cancel.request_id)
        for replica in replicas:
            await self.send(_dispatch_to(replica), cancel)
        if not replicas:
            self._early.append(cancel)

    async def _send(self, dispatched: Dispatched) -> None:
        info = dispatched.request.info
        trace = TraceContext(info.traceparent, info.tracestate)
        if dispatched.last and dispatched.resumed is None:
            self.metrics.record(instruments.QUEUE_WAIT, (now_ns() - dispatched.arrived_ns) / 1e9)
        if self.records(info.traceparent):
            self._trace_dispatch(dispatched, trace)
        budget = budget_of(dispatched.deadline_ns, now_ns())
        await self.send(
            _dispatch_to(dispatched.replica), dispatched.message, trace=trace, budget_ns=budget
        )

    def _trace_dispatch(self, dispatched: Dispatched, trace: TraceContext) -> None:
        counts = (names.PASSED_BY_PRIORITIES, names.PASSED_BY_TENANTS, names.PASSED_BY_OWN)
        passed_by = dict(zip(counts, dispatched.passed_by, strict=True))
        if dispatched.resumed is not None:
            resumed = dispatched.resumed
            self._trace(names.FAIRNESS_RESUME, resumed, resumed.paused_ns, passed_by)
        elif dispatched.last:
            attributes = {names.PRIORITY: dispatched.request.priority, **passed_by}
            info = dispatched.request.info
            self.span(info.request_id, trace, dispatched.arrived_ns, attributes)

    def _trace_pause(self, running: Running) -> None:
        reason = "preempted" if running.preempted else "time slice"
        self._trace(names.FAIRNESS_YIELD, running, running.asked_ns, {names.YIELD_REASON: reason})

    def _trace(self, name: str, running: Running, start_ns: int, attributes: Attributes) -> None:
        """Record a span of a sequence: until it paused, or while it was paused."""
        info = running.request.info
        if self.records(info.traceparent):
            trace = TraceContext(info.traceparent, info.tracestate)
            attributes = {
                names.SAMPLE_INDEX: running.spec.sample_index,
                names.PRIORITY: running.request.priority,
                **attributes,
            }
            self.span(info.request_id, trace, start_ns, attributes, name=name)


def _dispatch_to(replica: str) -> Link[DispatchMessage]:
    """Return the link to a replica, whose name is the role of its batching stage."""
    return at(DISPATCH, split_role(replica)[1])
