"""The admission stage's shell: the way in, and the lane's place among other lanes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import ClassVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from ...bus import Inbox, RequestEntry, StageState
from ...bus.control import (
    Cancel,
    CancelAll,
    Drain,
    ServerRestarted,
    StageReady,
    StageStarted,
    StageStopped,
)
from ...bus.messages import (
    Envelope,
    Fenced,
    Recovered,
    RequestFinished,
)
from ...bus.public import Completion
from ...config import RequestError
from ...telemetry import instruments, names, now_ns
from ..actor import FAILED, StageContext
from ..tokenizer import load_tokenizer, stop_token_ids_of
from .core import AdmissionCore, request_id_of, status_of
from .ledger import Unanswered, entry_deadline_ns
from .long_prompts import LongPrompts, Tokenized
from .overload import FinishRate, overloaded
from .poison import GIVEN_UP_CODES, is_of_the_entry, why_given_up
from .recovery import RecoveringStage
from .spans import trace_entry, trace_first_again

# Cancellations of entries not seen yet that are kept.
REMEMBERED_CANCELS = 4096

# Entries that are let in, or looked at, in one go.
TAKE_BATCH = 64

# How often to look whether too many requests wait.
LOOK_S = 1.0


class AdmissionStage(RecoveringStage):
    """Takes requests while all stages are ready and there is room; resumes what a failure hit.

    An entry of the requests queue is acknowledged only when streaming has written the request's
    terminal message. What was taken before and not acknowledged is found again at the start.

    On Redis other lanes may serve the same queue. What this lane holds is leased: it renews the
    lease, takes over what others no longer renew, and lets go of what others have taken over.
    """

    name: ClassVar[str] = "admission"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._on_drained = context.on_drained
        # The inbox, the requests queue and the leases are looked after by three tasks; they take
        # turns.
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self._draining = False
        self._overdue = False
        self._drain_until_ns = 0
        # Entries that were cancelled before they were let in, oldest first.
        self._cancelled_early: OrderedDict[str, Cancel] = OrderedDict()
        self._taking = anyio.CancelScope()
        self._long_prompts = LongPrompts()
        # Entries whose prompts are tokenised apart, until they are in the ledger.
        self._apart: set[str] = set()
        self._group: TaskGroup
        self._rate = FinishRate()

    # --- starting -----------------------------------------------------------------------------

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, folder)
        self._core = await anyio.to_thread.run_sync(
            lambda: AdmissionCore(self.config, tokenizer, stop_token_ids_of(folder, tokenizer))
        )
        # Prometheus sees a counter rise only if it has seen it before.
        self._count_refused(0)
        for code in GIVEN_UP_CODES:
            self.metrics.record(instruments.BURIED, 0, {names.ERROR_TYPE: code})

    async def receive_forever(self, inbox: Inbox) -> None:
        pending = await self.bus.requests.pending()
        now = self._renewed_ns = now_ns()
        self._inherited = [(entry, now) for entry in pending]
        async with anyio.create_task_group() as group:
            self._group = group
            await self._begin_epoch("admission started")
            group.start_soon(self._admit_forever)
            if self.config.bus.url != "memory":
                group.start_soon(self._keep_lane)
                group.start_soon(trace_first_again, self)
            await super().receive_forever(inbox)

    async def reset(self) -> None:
        """The epochs are this stage's own: a larger one was begun by its successor, or the counter
        was lost with the server's data.

        Raises:
            LaneReplaced: There is a successor.
        """
        async with self._turn:
            await self._renew()
            await self._begin_epoch("the stages were in a larger epoch")

    # --- the inbox ----------------------------------------------------------------------------

    async def handle(self, envelope: Envelope) -> None:
        async with self._turn:
            match envelope.body:
                case RequestFinished(request_id, entry_id):
                    await self._finish(request_id, entry_id)
                case Recovered(entry_id, samples):
                    await self._take_answer(entry_id, samples)
                case Fenced(entry_ids):
                    await self._take_fenced(entry_ids)
                case Cancel() as cancel:
                    await self._cancel(cancel)
                case CancelAll(operation_id):
                    await self._cancel_all()
                    await self.answer(operation_id)
                case StageStarted(self.name, incarnation) if incarnation != self.incarnation:
                    await self._renew()  # is it our successor, or an echo of a predecessor?
                case StageStarted(role) if role != self.name:
                    await self._come(role)
                case StageStopped(role, _, reason) if role != self.name:
                    self.log.warning("stage_lost", lost=role, reason=reason)
                    await self._leave(role, suspicious=reason.startswith(FAILED))
                case ServerRestarted():
                    self.bus.requests.distrust()
                    await self._begin_epoch("the server of the bus was restarted")
                case StageReady() as ready:
                    await self._take_part(ready, envelope.epoch)
                case Drain(timeout_ns):
                    self._start_drain(timeout_ns)
                case StageStarted() | StageStopped():
                    pass
                case other:
                    self.log.warning("message_not_understood", type=type(other).__name__)

    async def tick(self) -> None:
        async with self._turn:
            await self._expire(now_ns())
            if self._patience_ends_ns() is not None:
                await self._go_on()
            if self._draining:
                await self._drain()

    def wake_at_ns(self) -> int | None:
        wake_at = [self._next_deadline_ns(), self._patience_ends_ns()]
        if self._draining and not self._overdue:
            wake_at.append(self._drain_until_ns)
        return min((each for each in wake_at if each is not None), default=None)

    # --- what it tells of itself --------------------------------------------------------------

    def condition(self) -> tuple[StageState, str]:
        state, reason = super().condition()
        if self._draining and self.opened:
            return "draining", f"{len(self._ledger)} requests in flight may finish"
        if state == "ready" and self._alone:
            return "waiting", f"{len(self._alone)} requests under suspicion run one by one"
        return state, reason

    def waits_for(self) -> str:
        if self._missing:
            missing = [role for role in self._others if role in self._missing]
            return f"{', '.join(missing)} not ready"
        if self._asked:
            return f"streaming looks for {len(self._asked)} requests"
        return "it takes up what it holds"

    def load(self) -> dict[str, int | float | str]:
        recovering = len(self._alone) if self._resumed else len(self._ledger) + len(self._inherited)
        load: dict[str, int | float | str] = {
            "in_flight": len(self._ledger),
            "recovering": recovering,
        }
        if self._replicas > 1:
            load["replicas"] = f"{self._replicas_there()} of {self._replicas}"
        return load

    async def measure(self) -> None:
        record = self.metrics.record
        record(instruments.IN_FLIGHT, len(self._ledger))
        record(instruments.EPOCHS, self._epochs_begun)
        record(instruments.REPLAYS, self._replayed)
        self._epochs_begun = self._replayed = 0
        backlog = await self.bus.requests.backlog()
        record(instruments.WAITING, backlog.waiting)
        record(instruments.PENDING, backlog.pending)
        record(instruments.DEAD_LETTERS, backlog.dead)
        record(instruments.QUEUE_LENGTH, backlog.queue_length)

    # --- among other lanes --------------------------------------------------------------------

    async def _keep_lane(self) -> None:
        """Keeps the lane's leases, and the queue within its bounds."""
        third_ns = int(self.config.admission.lease_s / 3 * 1e9)
        while True:
            if now_ns() - self._renewed_ns >= third_ns:
                await self._keep_leases()
            while await self._shed():
                pass
            due_s = (self._renewed_ns + third_ns - now_ns()) / 1e9
            await anyio.sleep(min(LOOK_S, max(0.0, due_s)))

    async def _keep_leases(self) -> None:
        settings = self.config.admission
        before_ns = self._renewed_ns
        lost = await self.bus.requests.renew(settings.lease_s)
        async with self._turn:
            self._renewed_ns = now_ns()
            await self._lose(lost)
        if self._renewed_ns - before_ns > settings.lease_s * 1e9:
            return  # Redis was away, so the others could not renew theirs either
        if self._open.is_set() and not self._draining and self._free() > 0:
            entries = await self.bus.requests.take_over(settings.lease_s, self._free())
            if entries:
                async with self._turn:
                    await self._inherit(entries, "took_over_from_another_lane")

    async def _shed(self) -> int:
        def answer(entry: RequestEntry, waiting: int) -> Completion:
            now = now_ns()
            retry_after_s = self._rate.retry_after_s(waiting, now)
            return overloaded(entry, retry_after_s, self.config.engine.model_name, now)

        number = await self.bus.requests.shed(
            self.config.admission.max_queued, answer, max(1, self.epoch)
        )
        if number:
            self.log.warning("requests_refused_as_overloaded", requests=number)
            self._count_refused(number)
        return number

    def _count_refused(self, number: int) -> None:
        labels = {names.STATUS: "error", names.ERROR_TYPE: "overloaded"}
        self.metrics.record(instruments.REQUESTS, number, labels)

    # --- the way in ---------------------------------------------------------------------------

    async def _admit_forever(self) -> None:
        # On Redis others can serve what is still in the queue; in memory nobody else will.
        while not self._draining or self.config.bus.url == "memory":
            await self._open.wait()
            self._update_room()
            await self._room.wait()
            entries: list[RequestEntry] = []
            with anyio.CancelScope() as self._taking:
                entries = await self.bus.requests.take(min(TAKE_BATCH, max(1, self._free())))
            received = now_ns()
            self._in_hand |= {entry.entry_id: entry for entry in entries}
            owners = await self._claim(entries)
            for entry, owner in zip(entries, owners, strict=True):
                if owner != entry.entry_id and self._takes_long(entry):
                    self._apart.add(entry.entry_id)
                    self._group.start_soon(self._admit_apart, entry, received, owner)
                else:
                    await self._admit_in_turn(entry, received, owner)

    async def _admit_apart(self, entry: RequestEntry, received_ns: int, owner: str | None) -> None:
        """Admits an entry whose prompt takes long to tokenise; nobody waits for it."""
        tokenized = await self._tokenize(entry, received_ns, owner)
        await self._admit_in_turn(entry, received_ns, owner, tokenized)

    async def _tokenize(
        self, entry: RequestEntry, received_ns: int, owner: str | None
    ) -> Tokenized:
        try:
            self._core.check(entry, received_ns - entry.waited_ns, now_ns(), owner=owner)
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            return error
        deadline_ns = entry_deadline_ns(entry, received_ns)
        return await self._long_prompts.tokenize(entry, deadline_ns, self._core.tokenize)

    async def _admit_in_turn(
        self,
        entry: RequestEntry,
        received_ns: int,
        owner: str | None,
        tokenized: Tokenized | None = None,
    ) -> None:
        await self._wait_for_turn()
        try:
            await self._admit(entry, received_ns, owner, tokenized)
        finally:
            self._apart.discard(entry.entry_id)
            self._turn.release()

    def _take_up_later(self, entry: RequestEntry, received_ns: int, owner: str | None) -> None:
        self._in_hand[entry.entry_id] = entry
        self._apart.add(entry.entry_id)
        self._group.start_soon(self._take_up_apart, entry, received_ns, owner)

    async def _take_up_apart(
        self, entry: RequestEntry, received_ns: int, owner: str | None
    ) -> None:
        tokenized = await self._tokenize(entry, received_ns, owner)
        await self._wait_for_turn()
        try:
            if self._in_hand.pop(entry.entry_id, None) is not None:
                await self._ask_late(await self._judge_entry(entry, received_ns, owner, tokenized))
        finally:
            self._apart.discard(entry.entry_id)
            self._turn.release()

    async def _wait_for_turn(self) -> None:
        """Takes the turn at a time when all stages take part.

        A new epoch may begin while this waits for its turn. What were let in then could reach a
        stage that is not there yet, and be lost.
        """
        while True:
            await self._open.wait()
            await self._turn.acquire()
            if self._open.is_set():
                return
            self._turn.release()

    async def _admit(
        self,
        entry: RequestEntry,
        received_ns: int,
        owner: str | None,
        tokenized: Tokenized | None,
    ) -> None:
        if now_ns() - self._renewed_ns > self.config.admission.lease_s * 1e9:
            # This process stood still for long; others may have what it holds.
            await self._renew()
        if self._in_hand.pop(entry.entry_id, None) is None:
            return
        if entry.entry_id in self._ledger:
            return  # handed out twice, as a queue may; the first one counts
        if owner == entry.entry_id:
            await self._inherit([entry], "took_a_request_that_was_begun_before")
            return
        item = await self._judge_entry(entry, received_ns, owner, tokenized)
        if item.end is not None:
            await self._end(item, item.end)
        else:
            await self._hand_on(item, None)

    async def _judge_entry(
        self,
        entry: RequestEntry,
        received_ns: int,
        owner: str | None,
        tokenized: Tokenized | None = None,
    ) -> Unanswered:
        """Enters an entry in the ledger, either with its request or with what it ends with."""
        deadline = entry_deadline_ns(entry, received_ns)
        received_ns -= entry.waited_ns
        item = Unanswered(entry)
        try:
            self._let_in(item, received_ns, owner, tokenized)
            item.deadline_ns = deadline
            item.end = item.end or self._cancelled_early.pop(entry.entry_id, None)
        except RequestError as error:
            status = status_of(error.code)
            item.end = Cancel(item.request_id, item.entry_id, status, error.code, error.message)
            trace = trace_entry(self, entry, received_ns, error=error.code)
            log = self.log_of(item.request_id, trace)
            log.info("request_refused", code=error.code, reason=error.message)
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            item.request = None
            self._core.finish(item.request_id, item.entry_id)
            item.end = await self._bury(item, why_given_up(error))
        self._ledger.add(item)
        self._update_room()
        return item

    def _let_in(
        self,
        item: Unanswered,
        received_ns: int,
        owner: str | None,
        tokenized: Tokenized | None,
    ) -> None:
        """Sets an entry's request. Raises RequestError when it is refused."""
        entry = item.entry
        if self._draining:
            raise RequestError("the pipeline is shutting down", code="shutting_down")
        if isinstance(tokenized, Exception):
            self._core.check(entry, received_ns, now_ns(), owner=owner)
            item.end = self._cancelled_early.pop(entry.entry_id, None)
            if item.end is None:
                raise tokenized
            return
        request = self._core.admit(entry, received_ns, now_ns(), owner=owner, token_ids=tokenized)
        trace = trace_entry(self, entry, received_ns, request)
        if self.config.telemetry.log_prompts:
            content = msgspec.to_builtins(entry.request)
            self.log_of(item.request_id, trace).info("request_admitted", request=content)
        item.request = self._core.leaving(request, now_ns(), trace.traceparent, trace.tracestate)

    # --- the way out --------------------------------------------------------------------------

    async def _finish(self, request_id: str, entry_id: str) -> None:
        self._core.finish(request_id, entry_id)
        if entry_id in self._ledger:
            self._rate.finished(now_ns())
        self._ledger.remove(entry_id)
        self._late.discard(entry_id)
        self._answers.pop(entry_id, None)
        self._asked.discard(entry_id)
        self._update_room()
        await self.bus.requests.acknowledge(entry_id)
        await self._resume_when_answered()
        if self._alone:
            await self._next_alone()

    async def _cancel(self, cancel: Cancel) -> None:
        entry_id = cancel.entry_id or self._core.entry_of(cancel.request_id)
        entry_id = entry_id or self._in_hand_as(cancel.request_id)
        item = self._ledger.get(entry_id)
        if item is None or item.request_id != cancel.request_id:
            if entry_id:
                # It may be on its way in, or have ended already; nobody can tell here.
                self._cancelled_early[entry_id] = cancel
                self._long_prompts.hurry(entry_id)
                if len(self._cancelled_early) > REMEMBERED_CANCELS:
                    self._cancelled_early.popitem(last=False)
        elif item.end is None:
            await self._cut_short(item, msgspec.structs.replace(cancel, entry_id=entry_id))

    async def _cancel_all(self) -> None:
        message = "all requests in flight were ended from outside"
        for entry_id in self._apart:
            request_id = request_id_of(self._in_hand[entry_id]) if entry_id in self._in_hand else ""
            await self._cancel(Cancel(request_id, entry_id, "cancelled", "aborted", message))
        for item in list(self._ledger):
            if item.end is None:
                cancel = Cancel(item.request_id, item.entry_id, "cancelled", "aborted", message)
                await self._cut_short(item, cancel)

    def _in_hand_as(self, request_id: str) -> str:
        """The entry in hand that has this request id, "" for none."""
        found = (
            each for each, entry in self._in_hand.items() if request_id_of(entry) == request_id
        )
        return next(found, "")

    def _free(self) -> int:
        """How many more entries may be taken: those that were refused count until it is told."""
        unanswered = len(self._ledger) + len(self._inherited) + len(self._in_hand)
        return min(self._core.room(), self.config.admission.max_in_flight - unanswered)

    def _update_room(self) -> None:
        if self._free() > 0:
            self._room.set()
        else:
            self._room.clear()

    # --- draining -----------------------------------------------------------------------------

    def _start_drain(self, timeout_ns: int) -> None:
        if not self._draining:
            self._draining = True
            self._taking.cancel()
            self._long_prompts.hurry()
            self._drain_until_ns = now_ns() + timeout_ns
            self.log.info("draining", in_flight=len(self._ledger))

    async def _drain(self) -> None:
        """Done when every entry that was taken is answered; what is overdue ends with an error."""
        if not self._overdue and now_ns() >= self._drain_until_ns:
            self._overdue = True
            message = "the pipeline is shutting down and the request was not done in time"
            for item in self._ledger:
                if item.end is None:
                    late = Cancel(item.request_id, item.entry_id, "error", "shutting_down", message)
                    await self._cut_short(item, late)
        if not len(self._ledger) and (self._overdue or not self._apart):
            self._on_drained()
