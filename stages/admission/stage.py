"""The admission stage's shell: the way in, and the keeper of the epoch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import ClassVar

import anyio
import anyio.to_thread
import msgspec

from ...bus import Inbox, RequestEntry
from ...bus.links import ADMITTED, CONTROL, REFUSED
from ...bus.messages import (
    AdmittedRequest,
    Cancel,
    Drain,
    Envelope,
    RequestFinished,
    Reset,
    StageReady,
    StageStarted,
    StageStopped,
)
from ...config import STAGES, RequestError
from ...telemetry import TraceContext, names, now_ns
from ..actor import Actor, StageContext, budget_of
from ..tokenizer import load_tokenizer, stop_token_ids_of
from .core import AdmissionCore, request_id_of, status_of

OTHERS = tuple(stage for stage in STAGES if stage != "admission")

# Cancellations of entries not seen yet that are kept.
REMEMBERED_CANCELS = 4096

# Text longer than this is tokenised beside the event loop, which would stand still meanwhile.
LONG_TEXT = 16_384


class AdmissionStage(Actor):
    """Takes requests while all stages are ready and there is room; ends those that a failure hit.

    An entry of the requests queue is acknowledged only when streaming has written the request's
    terminal message. What was taken before and not acknowledged is found again at the start.
    """

    name: ClassVar[str] = "admission"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: AdmissionCore
        self._on_drained = context.on_drained
        # The inbox and the requests queue are read by two tasks; they take turns.
        self._turn = asyncio.Lock()
        self._missing: set[str] = set(OTHERS)
        self._open = asyncio.Event()
        self._room = asyncio.Event()
        self._draining = False
        self._overdue = False
        self._drain_until_ns = 0
        # Entries whose terminal message is not written yet, by entry id, each with the message
        # that ends it if a stage fails before.
        self._unanswered: dict[str, Cancel] = {}
        # Entries that were cancelled before they were let in, oldest first.
        self._cancelled_early: OrderedDict[str, Cancel] = OrderedDict()
        self._taking = anyio.CancelScope()

    # --- starting -----------------------------------------------------------------------------

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, folder)
        self._core = AdmissionCore(self.config, tokenizer, stop_token_ids_of(folder, tokenizer))

    async def receive_forever(self, inbox: Inbox) -> None:
        for entry in await self.bus.requests.pending():
            self._unanswered[entry.entry_id] = _failed(entry)
        await self._begin_epoch("admission started")
        async with anyio.create_task_group() as group:
            group.start_soon(self._admit_forever)
            await super().receive_forever(inbox)

    async def reset(self) -> None:
        """Nothing: the epochs are this stage's own, and the ledger outlives them."""

    # --- the inbox ----------------------------------------------------------------------------

    async def handle(self, envelope: Envelope) -> None:
        async with self._turn:
            match envelope.body:
                case RequestFinished(request_id, entry_id):
                    await self._finish(request_id, entry_id)
                case Cancel() as cancel:
                    await self._cancel(cancel)
                case StageStarted(stage) if stage != self.name:
                    await self._begin_epoch(f"{stage} started")
                case StageStopped(stage, _, reason) if stage != self.name:
                    self.log.warning("stage_lost", lost=stage, reason=reason)
                    await self._begin_epoch(f"{stage} stopped")
                case StageReady() as ready:
                    await self._take_part(ready, envelope.epoch)
                case Drain(timeout_ns):
                    self._start_drain(timeout_ns)
                case StageStarted() | StageStopped():
                    pass
                case other:
                    self.log.warning("message_not_understood", type=type(other).__name__)

    async def settle(self) -> None:
        if self._draining:
            async with self._turn:
                await self._drain()

    def wake_at_ns(self) -> int | None:
        return self._drain_until_ns if self._draining and not self._overdue else None

    # --- epochs -------------------------------------------------------------------------------

    async def _begin_epoch(self, reason: str) -> None:
        """All stages drop what they hold. Requests in flight end when streaming is ready."""
        self._open.clear()
        self._missing = set(OTHERS)
        self.epoch = await self.bus.next_epoch()
        self.log.debug("epoch_begins", epoch=self.epoch, reason=reason)
        for stage in OTHERS:
            await self.send(CONTROL[stage], Reset())

    async def _take_part(self, ready: StageReady, epoch: int) -> None:
        if epoch != self.epoch or ready.stage not in self._missing:
            return
        self._missing.discard(ready.stage)
        if ready.capacity is not None:
            self._core.set_capacity(ready.capacity)
        if ready.stage == "streaming":
            # Nothing was let in since the epoch began, so all of these were hit. A refusal that
            # is sent a second time here is dropped where results are written.
            for cancel in self._unanswered.values():
                await self._refuse(cancel)
        if not self._missing:
            self._open.set()
            self._update_room()
            self._on_ready(self.name)
            self.log.info("ready", epoch=self.epoch)

    # --- the way in ---------------------------------------------------------------------------

    async def _admit_forever(self) -> None:
        # On Redis others can serve what is still in the queue; in memory nobody else will.
        while not self._draining or self.config.bus.url == "memory":
            await self._open.wait()
            await self._room.wait()
            entries: list[RequestEntry] = []
            with anyio.CancelScope() as self._taking:
                entries = await self.bus.requests.take(min(64, max(1, self._core.room())))
            received = now_ns()
            exist = await asyncio.gather(
                *(self.bus.results.exists(request_id_of(entry)) for entry in entries)
            )
            for entry, exists in zip(entries, exist, strict=True):
                await self._wait_for_turn()
                try:
                    await self._admit(entry, received, exists)
                finally:
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

    async def _admit(self, entry: RequestEntry, received_ns: int, exists: bool) -> None:
        request_id = request_id_of(entry)
        if entry.entry_id in self._unanswered:
            return  # handed out twice, as a queue may; the first one counts
        try:
            if self._draining:
                raise RequestError("the pipeline is shutting down", code="shutting_down")
            request = await self._validate(entry, received_ns, exists)
        except RequestError as error:
            status = status_of(error.code)
            cancel = Cancel(request_id, entry.entry_id, status, error.code, error.message, True)
            self._unanswered[entry.entry_id] = cancel
            self._trace(entry, received_ns, error=error.code)
            self.log.info(
                "request_refused", request_id=request_id, code=error.code, reason=error.message
            )
            await self._refuse(cancel)
            return
        await self._let_in(entry, request)

    async def _validate(
        self, entry: RequestEntry, received_ns: int, exists: bool
    ) -> AdmittedRequest:
        if len(getattr(entry.request, "prompt", None) or "") < LONG_TEXT:
            return self._core.admit(entry, received_ns, now_ns(), exists=exists)
        return await anyio.to_thread.run_sync(
            lambda: self._core.admit(entry, received_ns, now_ns(), exists=exists)
        )

    async def _let_in(self, entry: RequestEntry, request: AdmittedRequest) -> None:
        info = request.info
        trace = self._trace(entry, info.received_ns, request)
        budget_ns = getattr(entry.request, "budget_ns", None)
        deadline = None if budget_ns is None else info.received_ns + budget_ns
        self._unanswered[entry.entry_id] = _failed(entry)
        self._update_room()
        now = now_ns()
        await self.send(
            ADMITTED,
            self._core.leaving(request, now, trace.traceparent, trace.tracestate),
            trace=trace,
            budget_ns=budget_of(deadline, now),
        )
        early = self._cancelled_early.pop(entry.entry_id, None)
        if early is not None:
            await self.send(ADMITTED, early)

    async def _refuse(self, cancel: Cancel) -> None:
        # Of no epoch: a refusal is true in any.
        await self.send(REFUSED, cancel, epoch=0)

    async def _finish(self, request_id: str, entry_id: str) -> None:
        self._core.finish(request_id, entry_id)
        self._unanswered.pop(entry_id, None)
        self._update_room()
        await self.bus.requests.acknowledge(entry_id)

    async def _cancel(self, cancel: Cancel) -> None:
        entry_id = self._core.entry_of(cancel.request_id)
        if entry_id is not None and cancel.entry_id in ("", entry_id):
            await self.send(ADMITTED, msgspec.structs.replace(cancel, entry_id=entry_id))
        elif cancel.entry_id and cancel.entry_id not in self._unanswered:
            # It may be on its way in, or have ended already; nobody can tell here.
            self._cancelled_early[cancel.entry_id] = cancel
            if len(self._cancelled_early) > REMEMBERED_CANCELS:
                self._cancelled_early.popitem(last=False)

    def _update_room(self) -> None:
        if self._core.room() > 0:
            self._room.set()
        else:
            self._room.clear()

    # --- draining -----------------------------------------------------------------------------

    def _start_drain(self, timeout_ns: int) -> None:
        if not self._draining:
            self._draining = True
            self._taking.cancel()
            self._drain_until_ns = now_ns() + timeout_ns
            self.log.info("draining", in_flight=len(self._unanswered))

    async def _drain(self) -> None:
        """Done when every entry that was taken is answered; what is overdue ends with an error."""
        if not self._overdue and now_ns() >= self._drain_until_ns:
            self._overdue = True
            message = "the pipeline is shutting down and the request was not done in time"
            for cancel in self._unanswered.values():
                late = Cancel(cancel.request_id, cancel.entry_id, "error", "shutting_down", message)
                await self.send(ADMITTED, late)
        if not self._unanswered:
            self._on_drained()

    # --- telemetry ----------------------------------------------------------------------------

    def _trace(
        self,
        entry: RequestEntry,
        received_ns: int,
        request: AdmittedRequest | None = None,
        error: str = "",
    ) -> TraceContext:
        """This stage's span; the context for the other stages' spans.

        They are siblings below the client's span, or, if the client gave none, below ours.
        """
        given = TraceContext(entry.traceparent, entry.tracestate)
        attributes: dict[str, str | int | float] = {names.MESSAGE_ID: entry.entry_id}
        if request is not None:
            attributes |= {
                names.REQUEST_MODEL: request.info.model,
                names.INPUT_TOKENS: request.info.num_prompt_tokens,
                names.SAMPLES: request.info.n,
                names.TENANT: request.tenant,
                names.PRIORITY: request.priority,
            }
        request_id = request_id_of(entry)
        own = self.span(request_id, given, received_ns, attributes, error=error)
        return given if given.trace_id else own


def _failed(entry: RequestEntry) -> Cancel:
    request_id = request_id_of(entry)
    message = "a stage of the pipeline failed while the request was in flight; send it again"
    return Cancel(request_id, entry.entry_id, "error", "lane_failed", message, unstarted=True)
