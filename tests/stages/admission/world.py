"""A deployment without processes: lanes that share a queue, each with admission's core and stages.

Whatever may happen next is an `Action`; who plays the world chooses among them. Messages of one
link come in order, those of different links in any. An inbox outlives its stage until the next one
opens its own; what was in it is lost then.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from nano_inference.bus.control import (
    Cancel,
    CancelAll,
    Drain,
    Reset,
    ServerRestarted,
    StageReady,
    StageStopped,
)
from nano_inference.bus.entries import RequestEntry, id_in
from nano_inference.bus.envelope import Message
from nano_inference.bus.public import ErrorInfo, GenerateRequest
from nano_inference.bus.recovery import Recover
from nano_inference.config import (
    AdmissionConfig,
    Config,
    PipelineConfig,
    all_roles,
    role_of,
    split_role,
)
from nano_inference.stages.admission import effects as do
from nano_inference.stages.admission.arrivals import Arrival, Judged, Step
from nano_inference.stages.admission.checks import request_id_of
from nano_inference.stages.admission.epochs import EpochCore
from nano_inference.stages.admission.requests import entry_deadline_ns

from .stages import (
    Batching,
    Executor,
    Fairness,
    Killed,
    Mail,
    Run,
    Stage,
    Stream,
    Streaming,
    accepted,
)

LEASE_NS = 1_200_000_000
MAX_LANE_DEATHS = 3
MAX_IN_FLIGHT = 8
LAST_CHANCE = MAX_LANE_DEATHS - 1


class Traits(NamedTuple):
    """How a request turns out: tokens until it is done, and what goes wrong with it."""

    length: int = 2
    kills: bool = False
    refused: bool = False
    poison: bool = False
    unsendable: bool = False
    long: bool = False


class Action(NamedTuple):
    """Something that may happen: where and what, for people, and the doing of it.

    A fault happens if the player wants it; due actions happen before most others.
    """

    where: str
    what: object
    do: Callable[[], None]
    fault: bool = False
    due: bool = False


class World:
    """What all lanes share: time, the queue, the streams, and what became of each request."""

    def __init__(self, seed: int, lanes: int, replicas: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000_000_000
        self.epoch = 0
        self.queue: deque[RequestEntry] = deque()
        # Each with its lane and when the lease was renewed.
        self.taken: dict[str, tuple[str, int]] = {}
        self.owners: dict[str, str] = {}
        self.streams: dict[str, Stream] = defaultdict(Stream)
        self.published: dict[str, tuple[RequestEntry, Traits]] = {}
        self.cancelled: set[str] = set()
        self.dead_lettered: dict[str, int] = {}
        self.log: list[tuple[int, str, object]] = []
        self.lanes = [Lane(self, f"lane{number}", replicas) for number in range(lanes)]

    def publish(self, traits: Traits, request_id: str = "", budget_ns: int | None = None) -> str:
        number = len(self.published) + 1
        entry_id = f"{number}-0"
        request = GenerateRequest(request_id=request_id, prompt="x", budget_ns=budget_ns)
        entry = RequestEntry(entry_id, request)
        self.published[entry_id] = entry, traits
        self.queue.append(entry)
        return entry_id

    def traits(self, entry_id: str) -> Traits:
        return self.published[entry_id][1]

    def ends(self, entry_id: str) -> list[str]:
        """How a request ended, in each stream in which it did."""
        return [
            stream.end
            for stream in self.streams.values()
            if stream.entry_id == entry_id and stream.end
        ]

    def claim(self, entry: RequestEntry) -> str | None:
        key = request_id_of(entry)
        if key == entry.entry_id:
            return key if self.streams[key].entry_id or self.streams[key].epoch else None
        owner = self.owners.get(key)
        self.owners.setdefault(key, entry.entry_id)
        return owner

    def actions(self) -> Iterator[Action]:
        for lane in self.lanes:
            yield from lane.actions()

    def step(self, *, faults: bool) -> bool:
        """Does something that may happen now; False if there is nothing but time to pass."""
        possible = [each for each in self.actions() if faults or not each.fault]
        if not possible:
            return False
        due = [each for each in possible if each.due]
        action = self.rng.choice(due if due and self.rng.random() < 0.5 else possible)
        self.log.append((self.now, action.where, action.what))
        action.do()
        return True

    def settle(self) -> None:
        """Everybody comes back, and nothing goes wrong any more."""
        for lane in self.lanes:
            lane.stalled = False
        for _ in range(20_000):
            if not self.step(faults=False):
                if self.at_rest():
                    return
                self.now += 50_000_000
        raise AssertionError("it never comes to rest")

    def at_rest(self) -> bool:
        return not self.queue and not self.taken and all(lane.at_rest() for lane in self.lanes)


class Lane:
    """Admission, the stages that it leads, and the messages between them."""

    def __init__(self, world: World, name: str, replicas: int) -> None:
        self.world, self.name, self.replicas = world, name, replicas
        self.stalled = False
        self.draining = False
        self.links: dict[tuple[str, str, str], deque[Mail]] = defaultdict(deque)
        self.stages: dict[str, Stage] = {role: self._make(role) for role in all_roles(replicas)[1:]}
        self.admission: Admission | None = None
        # Writes of streamings that are only thought dead, each with the epoch of which they are.
        self.late_writes: list[tuple[Streaming, int]] = []

    def _make(self, role: str) -> Stage:
        def send(receiver: str, link: str, body: Any, epoch: int) -> None:
            self.links[role, link, receiver].append(Mail(body, epoch))

        stage, replica = split_role(role)
        traits = self.world.traits
        match stage:
            case "fairness":
                return Fairness(role, send)
            case "batching":
                return Batching(role, send, role_of("executor", replica))
            case "executor":
                batching = role_of("batching", replica)
                return Executor(
                    role, send, batching, lambda e: traits(e).length, lambda e: traits(e).kills
                )
            case _:
                return Streaming(send, self.world.streams.__getitem__)

    def clear_inbox(self, role: str) -> None:
        for (_, _, receiver), link in self.links.items():
            if receiver == role:
                link.clear()

    def at_rest(self) -> bool:
        admission = self.admission
        if admission is None or any(self.links.values()) or self.late_writes:
            return False
        held = admission.core.requests
        return not (len(held.ledger) or len(held.incoming) or held.inherited) and (
            admission.drained if self.draining else admission.core.is_open
        )

    # --- what may happen ----------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        if self.stalled:
            return
        yield from self._stage_actions()
        if self.admission is None:
            yield Action(self.name, "admission starts", self._start_admission)
        else:
            yield Action(self.name, "admission dies", self._kill_admission, fault=True)
            yield from self.admission.actions()
        for writer, epoch in self.late_writes:
            write = partial(self._write_late, writer, epoch)
            yield Action(self.name, "a dead streaming writes", write)

    def _stage_actions(self) -> Iterator[Action]:
        for role, stage in self.stages.items():
            if not stage.up:
                yield Action(self.name, (role, "starts"), partial(self._start, role))
                continue
            for how in ("fails", "leaves", "is killed"):
                yield Action(self.name, (role, how), partial(self._stop, role, how), fault=True)
            if stage.ready():
                yield Action(self.name, (role, "works"), partial(self._work, stage))
            for key, link in self.links.items():
                if link and key[2] == role:
                    yield Action(self.name, (key, link[0]), partial(self._deliver, stage, link))

    def _start_admission(self) -> None:
        self.clear_inbox("admission")
        self.admission = Admission(self)
        self.admission.begin()

    def _kill_admission(self) -> None:
        self.admission = None

    def _start(self, role: str) -> None:
        self.clear_inbox(role)
        self.stages[role] = self._make(role)
        self.stages[role].start()

    def _stop(self, role: str, how: str) -> None:
        stage = self.stages[role]
        stage.stop()
        if isinstance(stage, Streaming) and stage.writes and self.world.rng.random() < 0.5:
            self.late_writes.append((stage, stage.epoch))
        if how != "is killed":
            stopped = StageStopped(role, "", how, how == "fails")
            self.links[role, "control", "admission"].append(Mail(stopped, 0))

    def _write_late(self, writer: Streaming, epoch: int) -> None:
        self.late_writes.remove((writer, epoch))
        writer.deliver(epoch)

    def _work(self, stage: Stage) -> None:
        try:
            stage.work(self.world.rng.randrange)
        except Killed:
            self._stop(stage.role, "fails")

    def _deliver(self, stage: Stage, link: deque[Mail]) -> None:
        stage.take(link.popleft())


class Admission:
    """Does what the core wants, as the stage's shell does, and looks at it closely."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.world = lane, lane.world
        config = Config(
            admission=AdmissionConfig(
                lease_s=LEASE_NS / 1e9,
                max_lane_deaths=MAX_LANE_DEATHS,
                max_in_flight=MAX_IN_FLIGHT,
            ),
            pipeline=PipelineConfig(replicas=lane.replicas),
        )
        self.core = EpochCore(config, "admission", f"admission-{self.world.epoch}")
        self.gate = False
        self.drained = False
        self.has_capacity = False
        self.known: set[str] = set()
        # The way in: entries that a `take` waits for, that wait to be claimed, that wait for the
        # gate, whose prompts are tokenised, and of which that is done.
        self.taking: int | None = None
        self.claiming: list[RequestEntry] = []
        self.arrivals: deque[Arrival] = deque()
        self.tokenizing: list[Arrival] = []
        self.tokenized: list[Arrival] = []
        # Of this epoch: entries that were sent into the lane, or ended here.
        self.sent: set[str] = set()
        self.ended: dict[str, Cancel] = {}

    def begin(self) -> None:
        taken = self.world.taken
        self.known = {entry_id for entry_id, (lane, _) in taken.items() if lane == self.lane.name}
        pending = [self.world.published[each][0] for each in sorted(self.known)]
        self.tell(partial(self.core.begin, pending))
        if self.lane.draining:
            self.tell(Drain(LEASE_NS))

    # --- what may happen ----------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        name, core, now = self.lane.name, self.core, self.world.now
        for key, link in self.lane.links.items():
            if link and key[2] == "admission":
                yield Action(name, (key, link[0]), partial(self._receive, link))
        wake_at = core.wake_at_ns()
        if wake_at is not None and wake_at <= now:
            yield Action(name, "ticks", lambda: self.tell(core.tick), due=True)
        if self._may_want():
            yield Action(name, "wants entries", self._want)
        if self.taking is not None and self.world.queue:
            yield Action(name, "takes", self._take)
        if self.claiming:
            yield Action(name, "claims", self._claim)
        for number in range(len(self.tokenizing)):
            yield Action(name, "has tokenised", partial(self._tokenize, number))
        if self.gate and self.arrivals:
            yield Action(name, "admits", lambda: self._arrive(self.arrivals.popleft()))
        if self.gate and self.tokenized:
            yield Action(name, "admits a long one", lambda: self._arrive(self.tokenized.pop()))
        if now - core.renewed_ns >= LEASE_NS / 3:
            yield Action(name, "keeps its lease", self._keep_lease, due=True)

    def _receive(self, link: deque[Mail]) -> None:
        body, epoch = link.popleft()
        if epoch and epoch < self.core.epoch:
            return
        ready = isinstance(body, StageReady)
        self.tell(partial(self.core.take_part, body, epoch) if ready else body)
        self.tell(self.core.tick)

    def _may_want(self) -> bool:
        idle = self.taking is None and not self.claiming and not self.arrivals
        room = self.core.requests.room() > 0 and not self.core.draining
        return self.gate and idle and room and bool(self.world.queue)

    def _want(self) -> None:
        self.taking = max(1, self.core.requests.room())

    def _take(self) -> None:
        assert self.taking is not None
        number = min(self.taking, len(self.world.queue))
        self.taking = None
        self.claiming = [self.world.queue.popleft() for _ in range(number)]
        for entry in self.claiming:
            self.known.add(entry.entry_id)
            self.world.taken[entry.entry_id] = self.lane.name, self.world.now
        self.core.requests.incoming.add(self.claiming)

    def _claim(self) -> None:
        entries, self.claiming = self.claiming, []
        for entry in entries:
            owner = self.world.claim(entry)
            arrival = Arrival(entry, self.world.now, owner)
            if owner != entry.entry_id and self.world.traits(entry.entry_id).long:
                self.core.requests.incoming.set_apart(entry.key)
                self.tokenizing.append(arrival)
            else:
                self.arrivals.append(arrival)

    def _tokenize(self, number: int) -> None:
        self.tokenized.append(self.tokenizing.pop(number))

    def _arrive(self, arrival: Arrival) -> None:
        self.tell(partial(self.core.arrive, arrival))

    def _keep_lease(self) -> None:
        before_ns = self.core.renewed_ns
        self.tell(partial(self.core.renewed, self._renew()))
        held = self.core.requests
        if self.world.now - before_ns > LEASE_NS or not self.gate or self.core.draining:
            return
        entries = [
            self.world.published[entry_id][0]
            for entry_id, (lane, since) in self.world.taken.items()
            if since + LEASE_NS < self.world.now and lane != self.lane.name
        ]
        if mine := entries[: max(0, held.room())]:
            for entry in mine:
                self.known.add(entry.entry_id)
                self.world.taken[entry.entry_id] = self.lane.name, self.world.now
            self.tell(partial(self.core.inherit, mine, "taken over"))

    # --- events and effects -------------------------------------------------------------------

    def tell(self, event: Message | Step) -> None:
        for effect in self.core.handle(event, self.world.now):
            self._perform(effect)

    def send(self, role: str, link: str, body: Any, epoch: int | None = None) -> None:
        epoch = self.core.epoch if epoch is None else epoch
        self.lane.links["admission", link, role].append(Mail(body, epoch))

    def _perform(self, effect: do.Effect) -> None:
        # The task that takes entries goes on meanwhile.
        if self.taking is not None and self.world.queue and self.world.rng.random() < 0.2:
            self._take()
        match effect:
            case do.Then(event):
                self.tell(event)
            case do.BeginEpoch(reason):
                self.world.epoch += 1
                self.sent.clear()
                self.ended.clear()
                self.tell(partial(self.core.open_epoch, self.world.epoch, reason))
            case do.SendReset(role):
                self.send(role, "control", Reset())
            case do.Renew():
                self.tell(partial(self.core.renewed, self._renew()))
            case do.Claim(entries, overdue):
                long = [not overdue and self.world.traits(each.entry_id).long for each in entries]
                owners = list(map(self.world.claim, entries))
                self.tell(partial(self.core.admit_inherited, entries, owners, long))
            case do.Tokenize(arrival):
                self.tokenizing.append(arrival)
            case do.Judge():
                self.tell(partial(self.core.enter, self._judge(effect)))
            case do.Ask(items, opened):
                for each in opened:
                    self.send("streaming", "opened", each)
                self.send("streaming", "opened", Recover(items))
            case do.Forget(cancel):
                self.send("streaming", "opened", cancel)
            case do.Forward():
                self._forward(effect)
            case do.CutShort(cancel):
                self.send("fairness", "admitted", cancel)
            case do.End(cancel):
                self._end(cancel)
            case do.AddDeadLetter(entry, _, error, deaths):
                assert error.code != "lane_failed" or deaths >= MAX_LANE_DEATHS
                self.world.dead_lettered[entry.entry_id] = deaths
            case do.Acknowledge(entry_id):
                self._acknowledge(entry_id)
            case do.SetGate(is_open):
                self.gate = is_open
            case do.SetCapacity():
                self.has_capacity = True
            case do.StopTaking():
                self.taking = None
            case do.Drained():
                self.drained = True
            case _:
                assert isinstance(
                    effect,
                    do.TakePart | do.MarkPossiblyLost | do.StopWaiting | do.TraceCancel | do.Log,
                )

    def _renew(self) -> frozenset[str]:
        taken = self.world.taken
        lost = {each for each in self.known if taken.get(each, ("", 0))[0] != self.lane.name}
        self.known -= lost
        keys = frozenset(self.world.published[each][0].key for each in lost)
        for entry_id in self.known:
            taken[entry_id] = self.lane.name, self.world.now
        return keys

    def _judge(self, wanted: do.Judge) -> Judged:
        arrival = wanted.arrival
        entry, entry_id = arrival.entry, arrival.entry.entry_id
        request_id, traits = request_id_of(entry), self.world.traits(entry_id)

        def refused(code: str) -> Judged:
            return Judged(arrival, end=Cancel(request_id, entry_id, "error", code, ""))

        if wanted.owner not in (None, entry_id):
            return refused("duplicate_request")
        if wanted.draining:
            return refused("shutting_down")
        deadline_ns = entry_deadline_ns(entry, arrival.received_ns)
        if deadline_ns is not None and deadline_ns <= self.world.now:
            return refused("expired")
        assert self.has_capacity, "it can't be looked at before the executor was heard"
        if traits.refused:
            return refused("invalid_n")
        if traits.poison:
            return Judged(arrival, failure=ErrorInfo(code="internal_error", message=""))
        return Judged(arrival, accepted(request_id, entry_id), wanted.cancelled)

    def _forward(self, effect: do.Forward) -> None:
        entry_id, ledger = id_in(effect.key), self.core.requests.ledger
        item = ledger.get(effect.key)
        assert item is not None
        assert entry_id in self.known, "it is known to be another lane's"
        assert entry_id not in self.sent, "it runs twice in one epoch"
        assert entry_id not in self.ended, "it ends here and runs"
        if item.deaths >= LAST_CHANCE:
            others = (each for each in ledger if each.entry_id in self.sent)
            beside = [each for each in others if each.end is None]
            assert not beside, "a suspect must be alone"
        self.sent.add(entry_id)
        if self.world.traits(entry_id).unsendable:
            error = ErrorInfo(code="message_too_large", message="")
            self.tell(partial(self.core.give_up, effect.key, error))
            return
        tokens = sum(len(sample.token_ids) for sample in effect.samples or ())
        if effect.samples is None:
            self.send("streaming", "opened", effect.accepted.opened)
        key = effect.accepted.opened.request_id
        self.send("fairness", "admitted", Run(entry_id, key, tokens))

    def _end(self, cancel: Cancel) -> None:
        before = self.ended.setdefault(cancel.entry_id, cancel)
        assert before == cancel, "one request, two ends"
        self.send("streaming", "refused", cancel, epoch=0)

    def _acknowledge(self, entry_id: str) -> None:
        if entry_id in self.known:
            self.known.discard(entry_id)
            if self.world.taken.get(entry_id, ("", 0))[0] == self.lane.name:
                assert self.world.ends(entry_id), "it is unanswered"
                del self.world.taken[entry_id]

    def ask_for(self, wish: Cancel | CancelAll | Drain | ServerRestarted) -> None:
        """Somebody outside sends a control message."""
        self.lane.links["client", "control", "admission"].append(Mail(wish, 0))
