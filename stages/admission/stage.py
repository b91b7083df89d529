"""The admission stage's shell: entries in, and the lane's leases among other lanes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from ...bus import Inbox, RequestEntry
from ...bus.control import (
    AdaptersChanged,
    Cancel,
    CancelAll,
    FlushCache,
    ReplicaCapacity,
    Reset,
    StageReady,
    StageStopped,
    UnloadAdapter,
    WeightsChanged,
)
from ...bus.entries import entry_key
from ...bus.envelope import Envelope, Message
from ...bus.links import ADMITTED, CONTROL, OPENED, REFUSED, at
from ...bus.media import MediaItem
from ...bus.messages import RequestFinished
from ...bus.parts.experts import ExpertCapacity
from ...bus.parts.images import PromptMedia
from ...bus.parts.responses import ResponseCaching
from ...bus.public import Completion, GenerateRequest
from ...bus.recovery import Recover
from ...config import AdapterError, BusError, ChannelClosed, ModelError, shown, split_role
from ...media.turns import FairDecoder
from ...store.board import StageState
from ...store.images import NOTHING_STORED
from ...store.loaded_adapter import LoadedAdapter
from ...telemetry import TraceContext, instruments, names, now_ns
from ...text.images import ImageProcessor
from ...text.tokenizer import find_tokenizer, stop_token_ids_of
from ..actor import Actor, StageContext, budget_of
from . import effects as do
from .arrivals import Arrival, PromptImage, Step, Tokenized, Tokens
from .checks import request_id_of
from .core import AdmissionCore
from .epochs import EpochCore
from .forked_prompts import ForkedPrompts
from .held_images import LEASE_S as IMAGE_LEASE_S
from .held_images import HeldImages
from .judging import judge
from .long_prompts import LongPrompts, is_fork, is_long
from .measures import (
    compiling,
    count_fork,
    count_images,
    count_moe,
    preparing_images,
    trace_cancel,
    trace_first_again,
    trace_replay,
)
from .parts.adapters import Adapters
from .parts.constraints import Constraints
from .parts.images import Images
from .refusals import GIVEN_UP_CODES, is_of_the_entry, overloaded, why_given_up
from .requests import Unanswered, entry_deadline_ns
from .vanished import WATCH_S, VanishedReplicas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .parts.responses import Responses

TAKE_BATCH = 64
"""Entries taken from the queue at once."""

SHED_INTERVAL_S = 1.0
"""Seconds between checks whether too many requests wait."""

_UNLOADED = "the adapter was unloaded, and requests in flight were to end"


class AdmissionStage(Actor):
    """Takes requests while all stages are ready and there is room; recovers them after a failure.

    An entry of the requests queue is acknowledged once streaming has written the request's terminal
    message. Entries that were taken and not acknowledged are found again at the start.

    On Redis other lanes may serve the same queue. Entries are leased: the lane renews its leases,
    takes over entries of expired ones, and drops entries that other lanes have taken over.

    Attributes:
        epochs: State and decisions. Read-only for others.
    """

    name: ClassVar[str] = "admission"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.epochs = EpochCore(self.config, self.role, self.incarnation)
        self._requests = self.epochs.requests
        self._core: AdmissionCore
        self._on_drained = context.on_drained
        # Three tasks serve the inbox, the requests queue and the leases. Each holds this lock for
        # one event with all its effects.
        self._turn = asyncio.Lock()
        self._gate = asyncio.Event()
        self._room = asyncio.Event()
        self._taking = anyio.CancelScope()
        self._long_prompts = LongPrompts()
        images = self.config.images
        self._images = HeldImages(self.bus.store.images, images, durable=self.bus.durable)
        model = self.config.engine.model_name
        self._forks = ForkedPrompts(self.bus, self._requests, model, self.first_context)
        # Adapters to unload once no request in flight has them, and the operations to answer then.
        self._decoder: FairDecoder
        self._unloading: list[tuple[str, str]] = []
        self._has_experts = False
        # The last time when no request was in flight, as far as `load` has seen.
        self._idle_ns = now_ns()
        self._group: TaskGroup

    # --- starting -----------------------------------------------------------------------------

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        starting = anyio.CapacityLimiter(1)
        tokenizer = await anyio.to_thread.run_sync(find_tokenizer, folder, limiter=starting)
        if tokenizer is None:
            self.log.warning("no_tokenizer", meaning="only token ids are taken, and come back")
        self._core = await anyio.to_thread.run_sync(
            lambda: AdmissionCore(
                self.config,
                tokenizer,
                stop_token_ids_of(folder, tokenizer),
                self._image_processor(folder, tokenizer),
            ),
            limiter=starting,
        )
        self._decoder = FairDecoder(self._core.part(Images).decoder, self.config.images)
        # Prometheus sees an increase only of a counter that exists.
        self._count_refused(0)
        for code in GIVEN_UP_CODES:
            self.metrics.record(instruments.DEAD_LETTERED, 0, {names.ERROR_TYPE: code})
        count_moe(self, self.config.engine.model_name, 0)
        count_images(self, 0, 0.0)
        count_fork(self, None, 0)

    async def close(self) -> None:
        self._core.close()

    def _image_processor(
        self, folder: Path, tokenizer: PreTrainedTokenizerFast | None
    ) -> ImageProcessor | None:
        """Return the model's image processor; without a usable one it serves texts."""
        if tokenizer is None:
            return None
        try:
            return ImageProcessor.of(folder, tokenizer)
        except ModelError as error:
            self.log.warning("images_off", reason=str(error))
            return None

    async def receive_forever(self, inbox: Inbox) -> None:
        pending = await self.bus.requests.pending()
        async with anyio.create_task_group() as group:
            self._group = group
            await self._handle(partial(self.epochs.begin, pending))
            group.start_soon(self._admit_forever)
            if self.bus.durable:
                group.start_soon(self._keep_lane)
                group.start_soon(trace_first_again, self)
                if self.config.pipeline.replicas > 1:
                    group.start_soon(self._watch_replicas)
            await super().receive_forever(inbox)

    async def reset(self) -> None:
        """Handle a larger epoch: a successor's, or the server has lost the counter.

        Raises:
            LaneReplaced: There is a successor.
        """
        await self._handle(self.epochs.larger_epoch)

    # --- events and effects -------------------------------------------------------------------

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case RequestFinished(request_id, entry_id, response) as finished:
                if response is not None:
                    item = self._requests.ledger.get(entry_key(entry_id, request_id))
                    self._core.keep(item.accepted if item is not None else None, response)
                await self._handle(finished)
            case StageReady() as ready:
                await self._handle(partial(self.epochs.take_part, ready, envelope.epoch))
            case CancelAll() as cancel_all:
                await self._handle(cancel_all)
                await self.answer(envelope.operation_id)
            case AdaptersChanged(role, adapters):
                self._change(self.epochs.participants.change_adapters(role, adapters))
            case WeightsChanged(role, version):
                if version:
                    self._change(self.epochs.participants.change_weights(role, version))
                await self.answer(envelope.operation_id)
            case FlushCache():
                self._core.flush()
                await self.answer(envelope.operation_id)
            case UnloadAdapter() as unload:
                await self._unload(unload, envelope.operation_id)
            case other:
                await self._handle(other)

    def _change(self, capacity: ReplicaCapacity | None) -> None:
        """Set the lane's capacity, if a change concerns it."""
        if capacity is not None:
            self._core.set_capacity(capacity)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        return self._core.part(Adapters).loaded

    async def tick(self) -> None:
        await self._handle(self.epochs.tick)

    def wake_at_ns(self) -> int | None:
        return self.epochs.wake_at_ns()

    async def _handle(self, event: Message | Step) -> None:
        async with self._turn:
            await self._handle_locked(event)

    async def _handle_locked(self, event: Message | Step) -> None:
        """Perform all effects of an event. The caller holds `_turn`."""
        effects = self.epochs.handle(event, now_ns())
        if not self._room.is_set() and self._requests.room() > 0:
            self._room.set()
        for effect in effects:
            await self._perform(effect)
        if self._unloading:
            await self._answer_unloads()

    async def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.Judge():
                judged = judge(self, self._core, effect)
                await self._handle_locked(partial(self.epochs.enter, judged))
            case do.Forward():
                await self._or_give_up(effect.key, self._forward(effect))
            case do.Acknowledge(entry_id, request_id):
                await self.bus.requests.acknowledge(entry_id, request_id)
                if self._images.held or self._forks.held:
                    await self._images.release(entry_key(entry_id, request_id))
                    await self._forks.release(entry_key(entry_id, request_id))
            case do.Then(step):
                await self._handle_locked(step)
            case do.CutShort(cancel):
                await self.send(ADMITTED, cancel)
            case do.End(cancel):
                # Of no epoch: it holds in any.
                await self.send(REFUSED, cancel, epoch=0)
            case do.BeginEpoch(reason):
                self.epoch = await self.bus.next_epoch()
                await self._handle_locked(partial(self.epochs.open_epoch, self.epoch, reason))
            case do.SendReset(role):
                stage, replica = split_role(role)
                await self.send(at(CONTROL[stage], replica), Reset())
            case do.Renew():
                lost = await self.bus.requests.renew(self.config.admission.lease_s)
                self._forget(lost)
                await self._handle_locked(partial(self.epochs.renewed, lost))
            case do.Claim(entries, overdue):
                owners = await self._claim(entries)
                long = [not overdue and self._takes_long(entry) for entry in entries]
                admit = partial(self.epochs.admit_inherited, entries, owners, long)
                await self._handle_locked(admit)
            case do.Ask(items, opened, replica):
                for each in opened:
                    key = entry_key(each.entry_id, each.request_id)
                    await self._or_give_up(key, self.send(OPENED, each))
                await self.send(OPENED, Recover(items, replica))
            case do.Forget(cancel):
                await self.send(OPENED, cancel)
            case do.AddDeadLetter():
                await self._dead_letter(effect)
            case do.SetGate(is_open):
                self._gate.set() if is_open else self._gate.clear()
            case do.SetCapacity(capacity):
                self._core.set_capacity(capacity)
                experts = ExpertCapacity.find(capacity.parts)
                self._has_experts = experts is not None and experts.number > 0
                # The executor may have other weights of the same version than before.
                self._core.flush()
                responses = self._responses()
                if responses is not None and (reason := responses.why_off()):
                    self.log.warning("response_cache_off", reason=reason)
            case do.TakePart():
                self.takes_part()
            case do.MarkPossiblyLost():
                self.bus.requests.mark_possibly_lost()
            case do.Tokenize(arrival):
                self._group.start_soon(self._admit_apart, arrival)
            case do.StopWaiting(key):
                self._long_prompts.stop_waiting(key or None)
            case do.StopTaking():
                self._taking.cancel()
            case do.Drained():
                self._on_drained()
            case do.TraceCancel(trace, cancel):
                trace_cancel(self, TraceContext(*trace), cancel)
            case do.Log(level, event, fields, request_id, trace):
                log = self.log_of(request_id, TraceContext(*trace)) if request_id else self.log
                getattr(log, level)(event, **fields)
            case _:
                raise TypeError(f"unknown effect {type(effect).__name__}")

    async def _forward(self, effect: do.Forward) -> None:
        accepted, samples = effect.accepted, effect.samples
        opened, request = accepted.opened, accepted.admitted
        trace = TraceContext(request.info.traceparent, request.info.tracestate)
        if samples is not None:
            trace_replay(self, request.info.request_id, trace, effect.down_since_ns, samples)
            request = self._core.resumed(request, samples)
            if not request.sequences:
                return  # all are finished, and streaming waits for scores
            if (media := PromptMedia.find(request.parts)) is not None:
                await self._restore_images(effect.key, media.items)
        else:
            opened = self._core.look_up(accepted)
            await self.send(OPENED, opened, trace=trace)
        caching = ResponseCaching.find(opened.parts) if accepted.key is not None else None
        if caching is None or caching.response is None:  # else nothing is computed
            budget_ns = budget_of(effect.deadline_ns, now_ns())
            await self.send(ADMITTED, request, trace=trace, budget_ns=budget_ns)
        if samples is None and self._has_experts:
            count_moe(self, opened.model, 1)

    async def _restore_images(self, key: str, media: Sequence[MediaItem]) -> None:
        """Store images of a resumed request that are gone, as after a restart of the server.

        Raises:
            RequestError: unknown_image: the request names it by id alone; images_full.
        """
        item = self._requests.ledger.get(key)
        if item is None or not await self._images.missing(key, media):
            return
        await self._images.load(item.entry, self._core, self._decoder)

    async def _or_give_up(self, key: str, sending: Awaitable[None]) -> None:
        """Await what is sent for an entry; give the entry up if that fails because of it."""
        try:
            await sending
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            await self._handle_locked(partial(self.epochs.give_up, key, why_given_up(error)))

    async def _dead_letter(self, effect: do.AddDeadLetter) -> None:
        entry, error = effect.entry, effect.error
        log = self.log_of(request_id_of(entry), TraceContext(*effect.trace))
        log.error("request_given_up", code=error.code, deaths=effect.deaths)
        if isinstance(entry.request, GenerateRequest):
            try:
                await self.bus.requests.add_dead_letter(entry, error, effect.deaths)
                self.metrics.record(instruments.DEAD_LETTERED, 1, {names.ERROR_TYPE: error.code})
            except ChannelClosed:
                raise
            # The request ends all the same.
            except (BusError, TypeError, ValueError, RecursionError) as reason:
                log.error("dead_letter_lost", error=shown(str(reason)))

    # --- adapters -----------------------------------------------------------------------------

    async def _unload(self, unload: UnloadAdapter, operation_id: str) -> None:
        """Refuse an adapter from now on; `abort` ends its requests in flight."""
        id = unload.adapter
        if not self._core.part(Adapters).unload(id):
            error = AdapterError(
                f"no adapter {shown(id)} is loaded",
                code="adapter_not_found",
                remedy="load it first",
            )
            await self.answer(operation_id, error=error)
            return
        self._unloading.append((id, operation_id))
        if unload.in_flight == "abort":
            for item in self._with_adapter(id):
                ids = item.request_id, item.entry_id
                await self._handle(Cancel(*ids, "cancelled", "aborted", _UNLOADED))
        await self._answer_unloads()

    async def _answer_unloads(self) -> None:
        """Answer where no request in flight has the adapter any more."""
        for waiting in self._unloading[:]:
            id, operation_id = waiting
            if not self._with_adapter(id):
                self._unloading.remove(waiting)
                await self.answer(operation_id)

    def _with_adapter(self, id: str) -> list[Unanswered]:
        """Return the requests in flight that use an adapter."""
        return [
            item
            for item in self._requests.ledger
            if item.accepted is not None and item.accepted.admitted.info.adapter == id
        ]

    # --- status -------------------------------------------------------------------------------

    def condition(self) -> tuple[StageState, str]:
        state, reason = super().condition()
        if self.epochs.draining and self.opened:
            return "draining", f"{len(self._requests.ledger)} requests in flight may finish"
        if state == "ready" and self.epochs.alone:
            return "waiting", f"{len(self.epochs.alone)} requests under suspicion run one by one"
        return state, reason

    def waits_for(self) -> str:
        if missing := self.epochs.participants.missing:
            return f"{', '.join(missing)} not ready"
        if self.epochs.asked:
            return f"streaming looks for {len(self.epochs.asked)} requests"
        return "it takes up what it holds"

    def load(self) -> dict[str, int | float | str]:
        load: dict[str, int | float | str] = {
            "in_flight": len(self._requests.ledger),
            "recovering": self.epochs.num_recovering,
            "model": self.config.engine.model_name,
        }
        if not load["in_flight"]:
            self._idle_ns = now_ns()
        load["busy_s"] = round((now_ns() - self._idle_ns) / 1e9, 1)
        replicas = self.config.pipeline.replicas
        if (responses := self._responses()) is not None:
            load["responses"] = len(responses)
            load["response_hits"] = responses.hits
            load["response_lookups"] = responses.hits + responses.misses
        if replicas > 1:
            load["replicas"] = f"{self.epochs.participants.num_replicas()} of {replicas}"
        return load

    async def measure(self) -> None:
        record = self.metrics.record
        record(instruments.IN_FLIGHT, len(self._requests.ledger))
        epochs, replays = self.epochs.take_counts()
        record(instruments.EPOCHS, epochs)
        record(instruments.REPLAYS, replays)
        backlog = await self.bus.requests.backlog()
        record(instruments.WAITING, backlog.waiting)
        record(instruments.PENDING, backlog.pending)
        record(instruments.DEAD_LETTERS, backlog.dead)
        record(instruments.QUEUE_LENGTH, backlog.queue_length)
        stored = NOTHING_STORED
        if self._core.part(Images).processor is not None:
            stored = await self.bus.store.images.usage()
        record(instruments.STORED_IMAGES, stored.images)
        record(instruments.STORED_IMAGE_BYTES, stored.num_bytes)
        if (responses := self._responses()) is not None:
            record(instruments.RESPONSES, len(responses))
            record(instruments.RESPONSE_BYTES, responses.num_bytes)
            for result, number in responses.take_counts().items():
                record(instruments.RESPONSE_LOOKUPS, number, {names.RESPONSE_RESULT: result})

    def _responses(self) -> Responses | None:
        """Return the response cache; None if it is off."""
        if not (self.opened and self.config.engine.response_cache_bytes):
            return None
        from .parts.responses import Responses

        return self._core.part(Responses)

    async def _watch_replicas(self) -> None:
        """Continue the requests of replicas whose host has vanished on the others."""
        vanished = VanishedReplicas(socket.gethostname(), self.config.bus.lane)
        while True:
            await anyio.sleep(WATCH_S)
            try:
                reports = await self.bus.store.board.read()
            except BusError as error:
                self.log.debug("board_not_read", error=str(error))
                continue
            for role in vanished.look(reports, self.epochs.participants.heard):
                await self._handle(StageStopped(role, "", "its host reports no more", False))

    # --- leases -------------------------------------------------------------------------------

    async def _keep_lane(self) -> None:
        """Renew the lane's leases, and shed requests beyond the queue's bound."""
        third_ns = int(self.config.admission.lease_s / 3 * 1e9)
        renew_images_ns = 0
        while True:
            if now_ns() >= renew_images_ns:
                await self._images.renew()
                await self._forks.renew()
                renew_images_ns = now_ns() + int(IMAGE_LEASE_S / 3 * 1e9)
            if now_ns() - self.epochs.renewed_ns >= third_ns:
                await self._keep_leases()
            while await self._shed():
                pass
            due_s = (self.epochs.renewed_ns + third_ns - now_ns()) / 1e9
            await anyio.sleep(min(SHED_INTERVAL_S, max(0.0, due_s)))

    def _forget(self, keys: set[str]) -> None:
        """Leave what is held for these entries to another lane."""
        self._images.forget(keys)
        self._forks.forget(keys)

    async def _keep_leases(self) -> None:
        lease_s, before_ns = self.config.admission.lease_s, self.epochs.renewed_ns
        lost = await self.bus.requests.renew(lease_s)
        self._forget(lost)
        await self._handle(partial(self.epochs.renewed, lost))
        if self.epochs.renewed_ns - before_ns > lease_s * 1e9:
            return  # Redis was away, so other lanes could not renew either
        room = self._requests.room()
        if self._gate.is_set() and not self.epochs.draining and room > 0:
            entries = await self.bus.requests.take_over(lease_s, room)
            if entries:
                reason = "took_over_from_another_lane"
                await self._handle(partial(self.epochs.inherit, entries, reason))

    async def _shed(self) -> int:
        def answer(entry: RequestEntry, waiting: int) -> Completion:
            now = now_ns()
            retry_after_s = self._requests.finish_rate.retry_after_s(waiting, now)
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

    # --- incoming entries ---------------------------------------------------------------------

    async def _admit_forever(self) -> None:
        # While draining, other lanes can serve a durable queue; a queue in memory must be answered.
        while not self.epochs.draining or not self.bus.durable:
            await self._gate.wait()
            await self._wait_for_room()
            entries: list[RequestEntry] = []
            with anyio.CancelScope() as self._taking:
                most = min(TAKE_BATCH, max(1, self._requests.room()))
                entries = await self.bus.requests.take(most)
            received = now_ns()
            self._requests.incoming.add(entries)
            for entry, owner in zip(entries, await self._claim(entries), strict=True):
                arrival = Arrival(entry, received, owner)
                if owner != entry.entry_id and self._takes_long(entry):
                    self._requests.incoming.set_apart(entry.key)
                    self._group.start_soon(self._admit_apart, arrival)
                else:
                    await self._admit(arrival)

    async def _wait_for_room(self) -> None:
        if self._requests.room() <= 0:
            self._room.clear()
            await self._room.wait()

    async def _admit_apart(self, arrival: Arrival) -> None:
        """Admit an entry whose prompt takes long to tokenise, while others pass."""
        arrival = await self._with_prompt(arrival)
        if arrival.tokenized is None:
            tokenized = await self._tokenize(arrival)
            arrival = msgspec.structs.replace(arrival, tokenized=tokenized)
        await self._admit(arrival)

    async def _with_prompt(self, arrival: Arrival) -> Arrival:
        """Return an arrival; of a fork, with its prompt, or the error that refuses it."""
        entry = arrival.entry
        if not is_fork(entry):
            return arrival
        found: RequestEntry | Exception
        if isinstance(checked := self._check(arrival), Exception):
            found = checked
        else:
            deadline_ns = entry_deadline_ns(entry, arrival.received_ns)
            resolve = partial(self._forks.resolve, entry)
            found = await self._long_prompts.wait(entry, deadline_ns, resolve)
        count_fork(self, found)
        if isinstance(found, RequestEntry):
            return msgspec.structs.replace(arrival, entry=found)
        return msgspec.structs.replace(arrival, tokenized=found)

    async def _tokenize(self, arrival: Arrival) -> Tokenized:
        entry, received_ns = arrival.entry, arrival.received_ns
        request = self._check(arrival)
        if isinstance(request, Exception):
            return request
        deadline_ns = entry_deadline_ns(entry, received_ns)
        run = partial(self._long_prompts.run, entry, deadline_ns)
        tokenize = self._compile_and_tokenize
        if not self._core.part(Constraints).knows(request):
            tokenize = self._core.tokenize
            refusal = await run(self._compile, is_constraint=True)
            if refusal is not None:
                return refusal
        images: tuple[PromptImage, ...] = ()
        if request.images:
            load = partial(self._load_images, entry, request)
            loaded = await self._long_prompts.wait(entry, deadline_ns, load)
            if isinstance(loaded, Exception):
                return loaded
            images = loaded
        return await run(partial(tokenize, media=images))

    def _check(self, arrival: Arrival) -> GenerateRequest | Exception:
        """Check all of a request but its texts; return it, or the error that refuses it."""
        entry = arrival.entry
        owner = self._requests.owner_of(request_id_of(entry), arrival.owner)
        received_ns = arrival.received_ns - entry.waited_ns
        try:
            return self._core.check(entry, received_ns, now_ns(), owner=owner)[0]
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            return error

    async def _load_images(
        self, entry: RequestEntry, request: GenerateRequest
    ) -> tuple[PromptImage, ...]:
        with preparing_images(self, request):
            return await self._images.load(entry, self._core, self._decoder)

    def _compile_and_tokenize(
        self, request: GenerateRequest, media: Sequence[PromptImage]
    ) -> Tokens:
        self._compile(request)
        return self._core.tokenize(request, media)

    def _compile(self, request: GenerateRequest) -> None:
        if request.sampling.constraint is not None:
            with compiling(self, request.sampling.constraint):
                self._core.part(Constraints).prepare(request)

    async def _admit(self, arrival: Arrival) -> None:
        """Admit an entry while all stages take part.

        A new epoch may begin while this waits for `_turn`: a request admitted then could reach a
        stage that has not started, and be lost.
        """
        while True:
            await self._gate.wait()
            async with self._turn:
                if self._gate.is_set():
                    await self._handle_locked(partial(self.epochs.arrive, arrival))
                    return

    async def _claim(self, entries: Sequence[RequestEntry]) -> list[str | None]:
        claims = [(request_id_of(entry), entry.entry_id) for entry in entries]
        return await self.bus.results.claim(claims)

    def _takes_long(self, entry: RequestEntry) -> bool:
        """Return whether an entry is to be tokenised apart, while others pass."""
        return is_long(entry) and (is_fork(entry) or self._core.may_fit(entry))
