"""What admission does when something fails: new epochs, resuming, and requests that go elsewhere.

A new epoch goes through these states: some stages are missing; streaming is asked what it has of
each unanswered request; all have been resumed, those under suspicion one after the other; open,
that is new requests are let in.

Where there are several replicas, an epoch waits for those that are known to live, and for the
others no longer than `PATIENCE_S`; one is enough. What a replica had is lost with it, and a new
epoch begins, in which the others take that up. A replica that comes later takes part in the epoch
that there is: it has no part in what is under way.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from ...bus import RequestEntry
from ...bus.control import Cancel, LaneCapacity, Reset, StageReady
from ...bus.links import ADMITTED, CONTROL, REFUSED, at
from ...bus.messages import Recover, RecoveredSample
from ...bus.public import ErrorInfo, GenerateRequest
from ...config import REPLICATED, BusError, ChannelClosed, all_roles, role_of, shown, split_role
from ...telemetry import TraceContext, instruments, names, now_ns
from ..actor import Actor, StageContext, budget_of
from .core import AdmissionCore, request_id_of
from .ledger import Ledger, Unanswered, context_of, entry_deadline_ns, recovery_items
from .long_prompts import Tokenized, is_long
from .poison import is_of_the_entry, why_given_up
from .replicas import is_replicated, smallest

# How long an epoch waits for replicas of which it is not known whether they live.
PATIENCE_S = 1.0

# Requests gone to other lanes of which streaming is reminded in the next epoch.
REMEMBERED_ELSEWHERE = 4096

EXPIRED = "the request's time budget ran out while a stage was missing"


class RecoveringStage(Actor):
    """The half of admission that keeps the ledger and the epoch. Its methods run in turn."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: AdmissionCore
        self._ledger = Ledger(self.config.admission.max_lane_deaths)
        self._replicas = self.config.pipeline.replicas
        self._others = all_roles(self._replicas)[1:]
        # Of this epoch: roles that it waits for, roles that take part, and until when it waits
        # for replicas that may not be there.
        self._missing: set[str] = set(self._others)
        self._heard: set[str] = set()
        self._patient_until_ns = 0
        # Roles that have left and not come back, as far as is known here.
        self._left: set[str] = set()
        self._capacities: dict[str, LaneCapacity] = {}
        # Taken by a predecessor or another lane, each with the time at which it came, and not
        # looked at yet: that takes the lane's capacity.
        self._inherited: list[tuple[RequestEntry, int]] = []
        # Of this epoch: entries that streaming has been asked about and not answered yet, and
        # what it answered.
        self._asked: set[str] = set()
        self._answers: dict[str, tuple[RecoveredSample, ...]] = {}
        # Entries under suspicion that wait to run alone.
        self._alone: deque[str] = deque()
        self._asked_all = False
        self._resumed = False
        self._open = asyncio.Event()
        # Taken from the queue, and not in the ledger yet.
        self._in_hand: dict[str, RequestEntry] = {}
        # Of this epoch: entries that streaming was asked about after the others had gone on.
        self._late: set[str] = set()
        self._elsewhere: deque[Cancel] = deque(maxlen=REMEMBERED_ELSEWHERE)
        self._renewed_ns = now_ns()
        # For `measure`: what counters have gained.
        self._epochs_begun = self._replayed = 0
        # Since when the lane serves nothing, also over several epochs; for spans.
        self._down_since_ns = 0

    @abstractmethod
    async def _judge_entry(
        self,
        entry: RequestEntry,
        received_ns: int,
        owner: str | None,
        tokenized: Tokenized | None = None,
    ) -> Unanswered:
        """Enters an entry in the ledger, either with its request or with what it ends with."""

    @abstractmethod
    def _take_up_later(self, entry: RequestEntry, received_ns: int, owner: str | None) -> None:
        """Tokenises an inherited entry first, then asks streaming about it."""

    @abstractmethod
    def _update_room(self) -> None:
        """The ledger has changed."""

    # --- epochs -------------------------------------------------------------------------------

    async def _begin_epoch(self, reason: str) -> None:
        """All stages drop what they hold. Requests in flight are resumed when all are ready."""
        if self._resumed or not self._down_since_ns:
            self._down_since_ns = now_ns()
        self._open.clear()
        self._asked_all = self._resumed = False
        self._missing = set(self._others)
        self._heard.clear()
        self._capacities.clear()
        self._patient_until_ns = now_ns() + int(PATIENCE_S * 1e9)
        self._asked.clear()
        self._late.clear()
        self._answers.clear()
        self._alone.clear()
        self.epoch = await self.bus.next_epoch()
        self._epochs_begun += 1
        self.log.debug("epoch_begins", epoch=self.epoch, reason=reason)
        for role in self._others:
            await self._send_reset(role)

    async def _send_reset(self, role: str) -> None:
        stage, replica = split_role(role)
        await self.send(at(CONTROL[stage], replica), Reset())

    async def _take_part(self, ready: StageReady, epoch: int) -> None:
        if epoch != self.epoch:
            return
        role = ready.stage
        self._heard.add(role)
        self._left.discard(role)
        if ready.capacity is not None:
            # A request may come to any replica, so it has to fit the smallest.
            self._capacities[role] = ready.capacity
            self._core.set_capacity(smallest(self._capacities.values()))
        if role not in self._missing:
            return
        self._missing.discard(role)
        await self._go_on()
        if role == "streaming":
            await self._ask_early(item for item in self._ledger if item.end is not None)

    async def _go_on(self) -> None:
        """Takes up what there is, once there is nobody left to wait for."""
        if self._asked_all or not self._are_enough(now_ns()):
            return
        if self._missing:
            self.log.warning("replicas_missing", missing=sorted(self._missing))
            self._missing.clear()
        await self._ask_streaming()

    def _are_enough(self, now: int) -> bool:
        """Whether all stages take part, but for replicas that are not there, while one is."""
        if not self._missing:
            return True
        replicas = {split_role(role)[1] for role in self._missing if is_replicated(role)}
        if len(replicas) == self._replicas or not all(map(is_replicated, self._missing)):
            return False
        left = {split_role(role)[1] for role in self._left if is_replicated(role)}
        return replicas <= left or now >= self._patient_until_ns

    def _replicas_there(self) -> int:
        """How many replicas take part."""
        return sum(role_of("batching", each) in self._heard for each in range(self._replicas))

    def _is_apart(self, role: str) -> bool:
        """Whether a stage is of a replica that has no part in this epoch, which goes on without.

        Batching says that it takes part before fairness hears of it, and the executor before
        batching does; so nothing has been sent to a replica of which nothing was heard.
        """
        if not is_replicated(role) or not self._asked_all:
            return False
        batching = role_of("batching", split_role(role)[1])
        return role not in self._heard and batching not in self._heard

    async def _come(self, role: str) -> None:
        """A stage is up, and holds nothing."""
        self._left.discard(role)
        if not self._is_apart(role):
            await self._begin_epoch(f"{role} started")
            return
        self.log.info("replica_joins", started=role)
        for stage in REPLICATED:
            await self._send_reset(role_of(stage, split_role(role)[1]))

    async def _leave(self, role: str, *, suspicious: bool) -> None:
        """What a stage held is lost. `suspicious`: it failed by itself."""
        self._left.add(role)
        if self._is_apart(role):
            return
        if suspicious:
            self._ledger.suspect(self._alone)
        await self._begin_epoch(f"{role} stopped")

    async def _ask_streaming(self) -> None:
        # What has gone to another lane must not be written to from here.
        await self._renew()
        while self._elsewhere:
            await self.send(CONTROL["streaming"], self._elsewhere.popleft())
        inherited, self._inherited = self._inherited, []
        owners = await self._claim([entry for entry, _ in inherited])
        for (entry, received_ns), owner in zip(inherited, owners, strict=True):
            if entry.entry_id in self._ledger or entry.entry_id in self._in_hand:
                continue
            if self._takes_long(entry):
                self._take_up_later(entry, received_ns, owner)
            else:
                await self._judge_entry(entry, received_ns, owner)
        await self._ask(list(self._ledger))
        self._asked_all = True
        await self._resume_when_answered()

    async def _ask_early(self, items: Iterable[Unanswered]) -> None:
        """Requests that are to end need none of the stages that are still missing but streaming."""
        if self._missing and "streaming" not in self._missing:
            await self._ask(list(items))

    async def _ask(self, items: Sequence[Unanswered]) -> None:
        self._asked.update(item.entry_id for item in items)
        replicas = range(self._replicas)
        executors = [each for each in replicas if role_of("executor", each) in self._heard]
        for some in recovery_items(items):
            await self.send(CONTROL["streaming"], Recover(some, min(executors, default=0)))

    async def _take_answer(self, entry_id: str, samples: tuple[RecoveredSample, ...]) -> None:
        self._answers[entry_id] = samples
        self._asked.discard(entry_id)
        item = self._ledger.get(entry_id)
        if self._missing and item is not None and item.end is not None:
            await self._end(item, item.end)
        elif entry_id in self._late and item is not None:
            self._late.discard(entry_id)
            await self._go_on_with(item)
            if self._alone:
                await self._next_alone()
        await self._resume_when_answered()

    def _takes_long(self, entry: RequestEntry) -> bool:
        """Whether others should not wait until an entry's prompt is tokenised."""
        return is_long(entry) and self._core.may_fit(entry)

    async def _ask_late(self, item: Unanswered) -> None:
        """Asks about an inherited entry when the others have gone on.

        Somebody may have worked on it, but not in this epoch: it was inherited before this began.
        """
        self._late.add(item.entry_id)
        await self._ask([item])

    async def _resume_when_answered(self) -> None:
        """All stages are ready, and streaming has said what it has: every request goes on."""
        if not self._asked_all or self._asked or self._resumed:
            return
        self._resumed = True
        if len(self._ledger):
            self.log.info("resuming", requests=len(self._ledger), epoch=self.epoch)
        for item in self._ledger:
            await self._go_on_with(item)
        self._update_room()
        self.takes_part()
        await self._next_alone()

    async def _go_on_with(self, item: Unanswered) -> None:
        if item.end is not None:
            await self._end(item, item.end)
            return
        match self._ledger.judge(item, self._answers.get(item.entry_id, ())):
            case "go":
                await self._resume(item)
            case "alone":
                self._open.clear()
                self._alone.append(item.entry_id)
            case "dead":
                await self._end(item, await self._bury(item, self._why_dead(item)))

    async def _resume(self, item: Unanswered) -> None:
        samples = self._answers.get(item.entry_id, ())
        self._replayed += 1
        self._trace_replay(item, sum(len(sample.token_ids) for sample in samples))
        await self._hand_on(item, samples)

    async def _next_alone(self) -> None:
        """Lets the next suspect run once nothing else does; opens when there is none left."""
        in_lane = sum(item.end is None for item in self._ledger) - len(self._alone)
        while self._alone and not in_lane:
            item = self._ledger.get(self._alone.popleft())
            if item is not None and item.end is None:
                self.log_of(item.request_id, context_of(item)).warning("resuming_alone")
                await self._resume(item)
                in_lane = 1
        if not self._alone and self._resumed:
            self._open.set()
            self.log.info("ready", epoch=self.epoch)

    def _why_dead(self, item: Unanswered) -> ErrorInfo:
        message = (
            f"the lane failed {item.deaths} times during this request, so it is given up; its "
            "entry is kept among the dead letters"
        )
        return ErrorInfo(code="lane_failed", message=message)

    async def _bury(self, item: Unanswered, error: ErrorInfo) -> Cancel:
        """Gives up on a request, of which nothing is in the lane; returns what it ends with."""
        log = self.log_of(item.request_id, context_of(item))
        log.error("request_given_up", code=error.code, deaths=item.deaths)
        if isinstance(item.entry.request, GenerateRequest):
            try:
                await self.bus.requests.bury(item.entry, error, item.deaths)
                self.metrics.record(instruments.BURIED, 1, {names.ERROR_TYPE: error.code})
            except ChannelClosed:
                raise
            # What can't be kept either is ended all the same.
            except (BusError, TypeError, ValueError, RecursionError) as reason:
                log.error("dead_letter_lost", error=shown(str(reason)))
        return Cancel(item.request_id, item.entry_id, "error", error.code, error.message)

    # --- into the lane, and out of it ---------------------------------------------------------

    async def _claim(self, entries: Sequence[RequestEntry]) -> list[str | None]:
        claims = [(request_id_of(entry), entry.entry_id) for entry in entries]
        return await self.bus.results.claim(claims)

    async def _hand_on(self, item: Unanswered, samples: Sequence[RecoveredSample] | None) -> None:
        """Sends a request into the lane, behind what there is of it; buries one that can't be."""
        request = item.request
        assert request is not None, "an entry that was not let in has an end"
        try:
            if samples is not None:
                request = self._core.resumed(request, samples)
                if not request.sequences:
                    return  # all are finished, and streaming has them scored
            await self.send(
                ADMITTED,
                request,
                trace=TraceContext(request.info.traceparent, request.info.tracestate),
                budget_ns=budget_of(item.deadline_ns, now_ns()),
            )
        except Exception as error:
            if not is_of_the_entry(error):
                raise
            await self._end(item, await self._bury(item, why_given_up(error)))

    async def _end(self, item: Unanswered, cancel: Cancel) -> None:
        """Ends a request of which nothing is in the lane; streaming adds what it has of it."""
        item.end = msgspec.structs.replace(
            cancel, request_id=item.request_id, entry_id=item.entry_id, unstarted=True
        )
        # Of no epoch: it is true in any.
        await self.send(REFUSED, item.end, epoch=0)

    async def _cut_short(self, item: Unanswered, cancel: Cancel) -> None:
        """Ends a request wherever it is; should the lane be down, when streaming is there."""
        item.end = cancel
        self._trace_cancel(item, cancel)
        if item.entry_id in self._alone:
            self._alone.remove(item.entry_id)
            await self._end(item, cancel)
            await self._next_alone()
        elif self._resumed:
            await self.send(ADMITTED, cancel)
        else:
            await self._ask_early([item])

    # --- spans --------------------------------------------------------------------------------

    def _trace_replay(self, item: Unanswered, kept_tokens: int) -> None:
        """From the failure, as far as it is known here, to the request's second start."""
        if item.request is not None:
            self.span(
                item.request_id,
                context_of(item),
                self._down_since_ns,
                {names.KEPT_TOKENS: kept_tokens},
                name="replay",
                events=((names.REPLAYED, now_ns()),),
            )

    def _trace_cancel(self, item: Unanswered, cancel: Cancel) -> None:
        """The request may be anywhere, and perhaps no other stage will have a span of it."""
        if item.request is not None:
            now = now_ns()
            events = ((names.CANCELLED, now),) if cancel.status == "cancelled" else ()
            trace = context_of(item)
            self.span(item.request_id, trace, now, name="cancel", error=cancel.code, events=events)

    # --- time that runs out while nobody else looks -------------------------------------------

    def _patience_ends_ns(self) -> int | None:
        """When it no longer waits for replicas, while others are there; None if that is not so."""
        if self._asked_all or not self._are_enough(self._patient_until_ns):
            return None
        return self._patient_until_ns

    def _next_deadline_ns(self) -> int | None:
        """Of the requests that are not in the lane, where others look at their time."""
        if self._resumed and not self._alone:
            return None
        deadlines = [entry_deadline_ns(*each) for each in self._inherited]
        deadlines += [item.deadline_ns for item in self._ledger if item.end is None]
        return min((each for each in deadlines if each is not None), default=None)

    async def _expire(self, now: int) -> None:
        if self._resumed and not self._alone:
            return
        for entry, received_ns in list(self._inherited):
            deadline_ns = entry_deadline_ns(entry, received_ns)
            if deadline_ns is not None and deadline_ns <= now:
                self._inherited.remove((entry, received_ns))
                self._ledger.add(Unanswered(entry, deadline_ns=deadline_ns))
        for item in self._ledger:
            over = item.deadline_ns is not None and item.deadline_ns <= now
            if over and item.end is None:
                expired = Cancel(item.request_id, item.entry_id, "expired", "expired", EXPIRED)
                await self._cut_short(item, expired)

    # --- other lanes --------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Renews the lease of what is held, and lets go of what another lane has taken over."""
        lost = await self.bus.requests.renew(self.config.admission.lease_s)
        self._renewed_ns = now_ns()
        await self._lose(lost)

    async def _lose(self, entry_ids: Iterable[str]) -> None:
        """Entries belong to another lane: nothing of them is to be written from here any more."""
        number = 0
        for entry_id in entry_ids:
            number += entry_id in self._in_hand or entry_id in self._ledger
            self._in_hand.pop(entry_id, None)
            self._late.discard(entry_id)
            self._inherited = [each for each in self._inherited if each[0].entry_id != entry_id]
            self._asked.discard(entry_id)
            self._answers.pop(entry_id, None)
            if entry_id in self._alone:
                self._alone.remove(entry_id)
            item = self._ledger.get(entry_id)
            if item is None:
                continue
            self._ledger.remove(entry_id)
            self._core.finish(item.request_id, entry_id)
            message = "another lane has taken the request over"
            gone = Cancel(
                *(item.request_id, entry_id, "cancelled", "cancelled", message), elsewhere=True
            )
            self._elsewhere.append(gone)
            if self._resumed:
                await self.send(ADMITTED, gone)
        if not number:
            return
        self.log.warning("requests_gone_to_another_lane", requests=number)
        self._update_room()
        await self._resume_when_answered()
        if self._alone:
            await self._next_alone()

    async def _inherit(self, entries: Sequence[RequestEntry], reason: str) -> None:
        """Goes on with requests on which somebody else has worked before."""
        now = now_ns()
        self._inherited += [(entry, now) for entry in entries]
        self.log.info(reason, requests=len(entries))
        await self._begin_epoch(reason)

    async def _take_fenced(self, entry_ids: Sequence[str]) -> None:
        """Somebody goes on with the streams of these entries; whose they are, the queue tells."""
        await self._renew()
        mine = [entry_id for entry_id in entry_ids if entry_id in self._ledger]
        if mine:
            await self._begin_epoch(f"{len(mine)} streams were taken by a lane that has not them")
