"""The actor of the batching stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ...bus.control import (
    Cancel,
    ControlSession,
    FlushCache,
    Pause,
    Resume,
    StageReady,
    StopSequences,
    TiersChanged,
)
from ...bus.envelope import Envelope, Message
from ...bus.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    KVEventEntry,
)
from ...bus.kv_sessions import KVSessionResult
from ...bus.links import CONTROL, CREDITS, HANDOVERS, PLANS, at
from ...bus.messages import (
    AdmittedRequest,
    Credit,
    Handover,
    PauseSequences,
    RequestInfo,
    ResumeSequences,
)
from ...bus.steps import StepSummary
from ...bus.weights import PAUSE_MODES, check_in_flight
from ...config import BusError, WeightsError, role_of_sender
from ...telemetry import instruments, names, now_ns
from ..actor import Actor, StageContext, budget_of, deadline_of
from ..tier_log import log_differences
from .core import BatchingCore, UnknownMessage
from .parts.handover.departures import Departures
from .parts.kv_events import KVEvents
from .spans import BatchingSpans


class BatchingStage(Actor):
    """Sends plans to the executor, one step ahead of its results."""

    name: ClassVar[str] = "batching"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        # None until the executor has sent its capacity for this epoch.
        self._core: BatchingCore | None = None
        # The core of the last epoch and its executor's incarnation. If the same executor comes
        # back, its blocks still hold their KV, and resumed requests find their prefixes.
        self._last: tuple[BatchingCore, str] | None = None
        self._executor = ""
        self._paused = False  # survives a failure
        self._pausing = ""  # operation id of the pause to answer
        self._draining = False  # a pause waits until what is here has finished
        # Dispatched meanwhile, with their deadlines.
        self._held_back: list[tuple[AdmittedRequest, int | None]] = []
        self._spans = BatchingSpans(self)
        # The last step's end, or the last time when there was nothing to compute.
        self._moved_ns = now_ns()
        self._num_published = 0  # entries with KV events

    async def close(self) -> None:
        if self._num_published:
            # The cache ends with this stage. Publishing doesn't wait, so it can't be cancelled.
            await self._publish((AllBlocksCleared(),))

    async def reset(self) -> None:
        if self._core is not None:
            if self.metrics.enabled:
                await self.measure()  # the counters may go with the core
            self._core.clear()
            self._last = (self._core, self._executor)
        self._core = None
        self._held_back.clear()
        self._spans.clear()

    async def announce(self) -> None:
        if self._core is not None:
            await super().announce()

    def waits_for(self) -> str:
        return "the executor has not sent its capacity"

    def load(self) -> dict[str, int | float | str]:
        core = self._core
        if core is None:
            return {}
        load: dict[str, int | float | str] = {"kv_pinned": 0, **core.load()}
        step_age_s = self._step_age_s(core)
        if held := self._held(core):
            load["held"] = held
        elif not core.idle:
            load["step_age_s"] = step_age_s
        return load

    def _held(self, core: BatchingCore) -> str:
        """Return why no step is planned; "" if steps may be."""
        if self._paused:
            return "generation is paused"
        return f"{', '.join(core.lacks)} released or not restored" if core.lacks else ""

    def _step_age_s(self, core: BatchingCore) -> float:
        """Return the time since the last step while there is something to compute, else 0."""
        if core.idle or self._held(core):
            self._moved_ns = now_ns()
        return round((now_ns() - self._moved_ns) / 1e9, 1)

    async def measure(self) -> None:
        core = self._core
        if core is None:
            return
        load, done, counts = core.load(), core.take_counters(), core.take_counts()
        self.metrics.record(instruments.STEP_AGE, self._step_age_s(core))
        self.metrics.record(instruments.PAUSED, int(self._paused))
        for instrument, value in (
            (instruments.RUNNING, load["running"]),
            (instruments.SEQUENCES_WAITING, load["waiting"]),
            (instruments.KV_TOTAL, load["kv_total"]),
            (instruments.KV_USED, load["kv_total"] - load["kv_free"]),
            (instruments.KV_CACHED, load["kv_cached"]),
            (instruments.KV_EVICTED, core.cache.take_evicted()),
            (instruments.PREFILLED, done.prefilled),
            (instruments.DECODED, done.decoded),
            (instruments.CACHED, done.cached),
            (instruments.RECOMPUTED, done.recomputed),
            (instruments.WASTED, done.wasted),
            (instruments.PREFIX_HITS, done.full_hits + done.partial_hits),
            (instruments.PREEMPTIONS, done.preemptions),
            (instruments.RESUMES, done.resumes),
        ):
            self.metrics.record(instrument, value)
        for result, number in (
            ("full", done.full_hits),
            ("partial", done.partial_hits),
            ("miss", done.misses),
        ):
            self.metrics.record(instruments.PREFIX_LOOKUPS, number, {names.PREFIX_RESULT: result})
        self.metrics.record(instruments.KV_PINNED, load.get("kv_pinned", 0))
        for outcome, count in counts.get("sessions", {}).items():
            self.metrics.record(
                instruments.KV_SESSION_RESULTS, count, {names.KV_SESSION_OUTCOME: outcome}
            )
        images = counts.get("images", {})
        self.metrics.record(instruments.ENCODED_IMAGES, images.get("encoded", 0))
        self.metrics.record(instruments.CACHED_IMAGE_TOKENS, images.get("kept_tokens", 0))
        states = counts.get("states", {})
        self.metrics.record(instruments.STATE_SNAPSHOTS, load.get("state_snapshots", 0))
        self.metrics.record(instruments.STATE_SNAPSHOTS_TAKEN, states.get("taken", 0))
        self.metrics.record(instruments.STATE_HITS, states.get("hits", 0))
        self.metrics.record(instruments.STATE_RECOMPUTED, states.get("recomputed_tokens", 0))
        if (moves := counts.get("tier_moves")) is not None:
            for tier in ("host", "disk", "states_host", "states_disk"):
                units = load.get(f"kv_{tier}", 0)
                self.metrics.record(instruments.KV_TIER_BLOCKS, units, {names.KV_TIER: tier})
            for move, count in moves.items():
                self.metrics.record(instruments.KV_TIER_MOVES, count, {names.KV_MOVE: move})
            self.metrics.record(instruments.KV_TIME_SAVED, counts["tier_times"]["saved_s"])

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StageReady() as ready:
                await self._begin_epoch(ready)
            case ControlSession() as request:
                await self._call_session(request, envelope.operation_id)
            case Pause() | Resume() | FlushCache() as request:
                await self._control(request, envelope.operation_id)
            case body if self._core is None:
                self.log.warning("message_before_capacity", type=type(body).__name__)
            case _:
                self._apply(self._core, envelope)

    async def _call_session(self, request: ControlSession, operation_id: str) -> None:
        """Handle a client's call about a session, also between a failure and the next epoch."""
        core = self._core or (self._last[0] if self._last is not None else None)
        result = KVSessionResult(outcome="missing", reason="the executor is not ready yet")
        if core is not None:
            result = core.receive(request, now_ns())
        await self.answer(operation_id, kv_session=result)

    async def _control(self, request: Pause | Resume | FlushCache, operation_id: str) -> None:
        """Handle an operator's request, also between a failure and the next epoch."""
        core = self._core or (self._last[0] if self._last is not None else None)
        match request:
            case Pause(in_flight):
                try:
                    check_in_flight(in_flight, PAUSE_MODES)
                except WeightsError as error:
                    await self.answer(operation_id, error=error)
                    return
                self._draining = in_flight == "wait" and not self._paused
                self._paused = self._paused or not self._draining
                if core is not None and in_flight != "wait":
                    why = "generation was paused, and requests in flight were to end"
                    core.interrupt(in_flight, why)
                await self._answer_pause()  # an earlier one, included in this one
                self._pausing = operation_id
            case Resume():
                self._paused = self._draining = False
                if core is not None:
                    self._add_held_back(core, lambda request, deadline_ns: True)
                await self._answer_pause()  # its wait for the last step is over
                await self.answer(operation_id)
            case FlushCache():
                if core is not None:
                    core.cache.flush()
                await self.answer(operation_id)
        if core is not None:
            core.paused = self._paused

    def _apply(self, core: BatchingCore, envelope: Envelope) -> None:
        match envelope.body:
            case StepSummary() as result:
                core.absorb(result)
                self._moved_ns = now_ns()
                self._spans.step_done(result)
            case AdmittedRequest() as request:
                now = now_ns()
                self._spans.arrived(request.info, now)
                deadline_ns = deadline_of(envelope, now)
                if self._draining:
                    self._held_back.append((request, deadline_ns))
                else:
                    core.add(request, deadline_ns)
            case StopSequences(seq_ids):
                core.stop(seq_ids)
            case PauseSequences(seq_ids):
                core.pause_sequences(seq_ids)
            case ResumeSequences(seq_ids, rank):
                core.resume_sequences(seq_ids, rank)
            case Cancel() as cancel:
                id = cancel.request_id
                self._add_held_back(core, lambda request, _: request.info.request_id == id)
                core.cancel(cancel)
                self._spans.ended(cancel.request_id)
            case message:
                self._apply_to_parts(core, message, envelope)

    def _apply_to_parts(self, core: BatchingCore, message: Message, envelope: Envelope) -> None:
        now = now_ns()
        try:
            reply = core.receive(message, now, deadline_of(envelope, now))
        except UnknownMessage:
            self.log.warning("message_not_understood", type=type(message).__name__)
            return
        if isinstance(message, TiersChanged):
            log_differences(message)
        if isinstance(reply, RequestInfo):  # of a sequence that another replica has handed over
            if isinstance(message, Handover):
                self._spans.handed_over(reply, message, role_of_sender(envelope.sender), now)
            else:  # the first token came before this message
                self._spans.arrived(reply, now)

    async def tick(self) -> None:
        core = self._core
        if core is None:
            return
        if self._held_back:
            now = now_ns()
            self._add_held_back(core, lambda _, due_ns: due_ns is not None and due_ns <= now)
        while (plan := core.plan(started := now_ns())) is not None:
            if self.metrics.enabled and plan.seq_ids:
                self.metrics.record(instruments.SCHEDULE_TIME, (now_ns() - started) / 1e9)
                self.metrics.record(instruments.BATCH_SIZE, len(plan.seq_ids))
            self._spans.planned(plan, core)
            await self.send(self.own(PLANS), plan)
        if (departures := core.find(Departures)) is not None:
            for each in departures.take_departures():
                budget = budget_of(each.deadline_ns, now_ns())
                await self.send(at(HANDOVERS, each.successor), each.message, budget_ns=budget)
        if (report := core.take_report()) is not None:
            await self.send(self.own(CREDITS), report)
        if (kv_events := core.find(KVEvents)) is not None and (events := kv_events.log.take()):
            await self._publish(events)
        if core.idle and report is None:  # which is to be written meanwhile
            core.check()
        if self._draining and core.idle:
            self._draining, self._paused, core.paused = False, True, True
            self._add_held_back(core, lambda request, deadline_ns: True)
        if core.at_rest:
            await self._answer_pause()

    def wake_at_ns(self) -> int | None:
        if self._core is None:
            return None
        times = [self._core.next_deadline_ns(), *(due_ns for _, due_ns in self._held_back)]
        return min((time for time in times if time is not None), default=None)

    def _add_held_back(
        self, core: BatchingCore, due: Callable[[AdmittedRequest, int | None], bool]
    ) -> None:
        """Add those requests to the core that were held back during a pause and are due."""
        held_back, self._held_back = self._held_back, []
        for each in held_back:
            if due(*each):
                core.add(*each)
            else:
                self._held_back.append(each)

    async def _answer_pause(self) -> None:
        pausing, self._pausing = self._pausing, ""
        await self.answer(pausing)

    async def _publish(self, events: tuple[KVEvent, ...]) -> None:
        """Publish KV events. If they are lost, readers see a gap; no request is affected."""
        batch = KVEventBatch(now_ns() / 1e9, events, self.replica)
        source = (self.bus.model, self.config.bus.lane, self.replica, self.incarnation)
        entry = KVEventEntry(*source, self._num_published, batch)
        self._num_published += 1
        try:
            is_lost = not await self.bus.kv_events.publish(entry)
        except BusError as error:
            self.log.warning("kv_events_lost", reason=str(error))
            is_lost = True
        if not self.metrics.enabled:
            return
        for kind, name in ((BlockStored, "stored"), (BlockRemoved, "removed")):
            number = sum(len(each.block_hashes) for each in events if isinstance(each, kind))
            label = {names.KV_EVENT: "lost" if is_lost else name}
            self.metrics.record(instruments.KV_EVENTS, number, label)

    async def _begin_epoch(self, ready: StageReady) -> None:
        if ready.capacity is None or self._core is not None:
            return
        core, executor = self._last or (None, "")
        keeps_cache = executor == ready.incarnation
        if core is None or not keeps_cache:
            core = BatchingCore(self.config.engine, ready.capacity)
        core.restart(ready.capacity)
        core.paused = self._paused
        self._executor = ready.incarnation
        self._last = None
        self._core = core
        await self.announce()
        # Admission must list this replica before fairness sends it sequences.
        await self.flush(CONTROL["admission"])
        credits = Credit(core.limits.max_batch_size, keeps_cache=keeps_cache)
        await self.send(self.own(CREDITS), credits)
