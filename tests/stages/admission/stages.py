"""The other stages as admission sees them: they hold requests, die, and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from nano_inference.bus.control import Cancel, ReplicaCapacity, Reset, StageReady, StageStarted
from nano_inference.bus.entries import entry_key
from nano_inference.bus.messages import (
    AdmittedRequest,
    Prompt,
    RequestFinished,
    RequestInfo,
    RequestOpened,
    SequenceSpec,
)
from nano_inference.bus.recovery import Fenced, Recover, Recovered, RecoveredSample, RecoveryItem
from nano_inference.config import SamplingParams
from nano_inference.stages.admission.arrivals import Accepted

CAPACITY = ReplicaCapacity(
    num_blocks=64, block_size=16, max_model_len=512, vocab_size=258, device="cpu"
)


def accepted(request_id: str, entry_id: str) -> Accepted:
    """A valid request of one sample."""
    ids, sequences = (request_id, entry_id), (SequenceSpec(1, 0, 0),)
    info, prompt = RequestInfo(*ids), Prompt((1,))
    admitted = AdmittedRequest(info, prompt, SamplingParams(), sequences, "", 0)
    return Accepted(RequestOpened(*ids, "m", 1, True, (), (1,)), admitted)


class Mail(NamedTuple):
    """A message on its way."""

    body: Any
    epoch: int


class Run(NamedTuple):
    """A request in the lane, behind so many tokens."""

    entry_id: str
    key: str
    tokens: int


class Step(NamedTuple):
    """A token of a request, the `index`-th; whether it is this run's first, and the last of all."""

    run: Run
    index: int
    first: bool
    last: bool


class Credit(NamedTuple):
    """Batching has places."""

    role: str


class Stage:
    """What all have in common: an epoch, and that a larger one makes them drop all."""

    def __init__(self, role: str, send: Callable[[str, str, Any, int], None]) -> None:
        """`send`: Given the receiver's role, the link's name, a message and its epoch."""
        self.role = role
        self.up = False
        self.epoch = 0
        self._send = send

    def start(self) -> None:
        """A new object in place of the old one."""
        self.up, self.epoch = True, 0
        self.reset()
        self._send("admission", "control", StageStarted(self.role, "another"), 0)

    def stop(self) -> None:
        """What it holds is lost; what it has sent is on its way."""
        self.up = False

    def take(self, mail: Mail) -> None:
        """Takes a message, as `Actor._dispatch` does."""
        if mail.epoch:
            if mail.epoch < self.epoch:
                return
            if mail.epoch > self.epoch:
                self.epoch = mail.epoch
                self.reset()
        if isinstance(mail.body, Reset):
            self.announce()
        else:
            self.handle(mail.body)

    def announce(self) -> None:
        self.send("admission", "control", StageReady(self.role, "another"))

    def send(self, role: str, link: str, body: Any, epoch: int | None = None) -> None:
        self._send(role, link, body, self.epoch if epoch is None else epoch)

    def reset(self) -> None:
        """Drops all."""

    def handle(self, body: Any) -> None:
        """Takes one message of the present epoch."""

    def ready(self) -> bool:
        """Whether it has something to do by itself."""
        return False

    def work(self, choose: Callable[[int], int]) -> None:
        """Does some of it. `choose`: an index below a number."""


class Fairness(Stage):
    def reset(self) -> None:
        self.held: dict[str, Run] = {}
        self.replicas: list[str] = []
        self.placed: dict[str, str] = {}
        self.early: list[Cancel] = []

    def handle(self, body: Any) -> None:
        match body:
            case Run():
                self.held[body.entry_id] = body
            case Credit(role):
                self.replicas.append(role)
                for cancel in self.early:
                    self.send(role, "dispatch", cancel)
                self.early.clear()
            case Cancel():
                self._cancel(body)

    def _cancel(self, cancel: Cancel) -> None:
        dropped = self.held.pop(cancel.entry_id, None) is not None
        cancel = unstarted_if(dropped, cancel)
        if self.replicas:
            role = self.placed.get(cancel.entry_id, self.replicas[0])
            self.send(role, "dispatch", cancel)
        else:
            self.early.append(cancel)

    def ready(self) -> bool:
        return bool(self.held and self.replicas)

    def work(self, choose: Callable[[int], int]) -> None:
        run = self.held.pop(next(iter(self.held)))
        role = self.replicas[choose(len(self.replicas))]
        self.placed[run.entry_id] = role
        self.send(role, "dispatch", run)


class Batching(Stage):
    def __init__(self, role: str, send: Any, executor: str) -> None:
        super().__init__(role, send)
        self.executor = executor

    def reset(self) -> None:
        self.has_capacity = False

    def announce(self) -> None:
        if self.has_capacity:
            super().announce()

    def handle(self, body: Any) -> None:
        if isinstance(body, StageReady) and not self.has_capacity:
            self.has_capacity = True
            self.announce()
            self.send("fairness", "credits", Credit(self.role))
        elif self.has_capacity:
            self.send(self.executor, "plans", body)


class Executor(Stage):
    def __init__(self, role: str, send: Any, batching: str, length_of: Any, kills: Any) -> None:
        super().__init__(role, send)
        self.batching = batching
        self.length_of, self.kills = length_of, kills

    def reset(self) -> None:
        self.running: dict[str, Run] = {}
        self.begun: set[str] = set()

    def announce(self) -> None:
        ready = StageReady(self.role, "another", CAPACITY)
        self.send("admission", "control", ready)
        self.send(self.batching, "control", ready)

    def handle(self, body: Any) -> None:
        if isinstance(body, Run):
            self.running[body.entry_id] = body
        elif isinstance(body, Cancel):
            run = self.running.pop(body.entry_id, None)
            unstarted = run is not None and run.entry_id not in self.begun
            self.send("streaming", "steps", unstarted_if(unstarted, body))

    def ready(self) -> bool:
        return bool(self.running)

    def work(self, choose: Callable[[int], int]) -> None:
        run = list(self.running.values())[choose(len(self.running))]
        if self.kills(run.entry_id):
            raise Killed(self.role)
        last = run.tokens + 1 == self.length_of(run.entry_id)
        first = run.entry_id not in self.begun
        self.begun.add(run.entry_id)
        self.send("streaming", "steps", Step(run, run.tokens, first, last))
        self.running.pop(run.entry_id)
        if not last:
            self.running[run.entry_id] = run._replace(tokens=run.tokens + 1)


class Killed(Exception):
    """A request has ended the stage that ran it."""


class Stream:
    """A result stream: tokens of one entry, in order, and its terminal message."""

    def __init__(self) -> None:
        self.entry_id = ""
        self.tokens = 0
        self.end = ""
        self.epoch = 0

    def write(self, entry_id: str, index: int | None, end: str, epoch: int) -> bool:
        """A token, or the end. False if the stream was recovered in a larger epoch."""
        if epoch < self.epoch:
            return False
        if self.end:
            return True
        assert self.entry_id in ("", entry_id), "two requests in one stream"
        self.entry_id = entry_id
        if index is not None:
            assert index == self.tokens, f"{entry_id}: token {index} behind {self.tokens}"
            self.tokens += 1
        if end:
            self.end = end
        return True


class Write(NamedTuple):
    """What streaming is about to write: a token, or an end."""

    key: str
    entry_id: str
    request_id: str
    index: int | None
    end: str


class Streaming(Stage):
    def __init__(self, send: Any, streams: Any) -> None:
        super().__init__("streaming", send)
        self.stream_of = streams
        self.writes: list[Write] = []

    def start(self) -> None:
        self.writes = []
        self.known: dict[str, Run] = {}
        self.fenced: set[str] = set()
        super().start()

    def reset(self) -> None:
        self.deliver(self.made_in if self.epoch else 0)
        self.made_in = self.epoch
        self.cut_short: set[str] = set()
        self.running: set[str] = set()
        self.opened: set[str] = set()
        # Steps and ends of requests that are not opened yet.
        self.early: dict[str, list[Any]] = {}

    def handle(self, body: Any) -> None:
        match body:
            case RequestOpened():
                if body.entry_id not in self.cut_short:
                    self.opened.add(body.entry_id)
                for each in self.early.pop(body.entry_id, ()):
                    self.handle(each)
            case Step(run) if run.entry_id not in self.opened:
                if run.entry_id in self.early or (body.first and not body.index):
                    self.early.setdefault(run.entry_id, []).append(body)
            case Step():
                self._step(body)
            case Cancel(_, entry_id) if entry_id in self.early and not body.elsewhere:
                self.early[entry_id].append(body)
            case Cancel():
                self._end(body)
            case Recover(items):
                self.deliver(self.epoch)
                for item in items:
                    self._recover(item)

    def _step(self, step: Step) -> None:
        run, index = step.run, step.index
        if step.first and run.entry_id in self.opened and (run.entry_id in self.known or not index):
            self.running.add(run.entry_id)
        if run.entry_id not in self.running:
            return  # it was meant for a predecessor, or comes too late
        known = self.known.get(run.entry_id, run._replace(tokens=0))
        assert index == known.tokens, f"{run.entry_id}: token {index} behind {known.tokens}"
        self.known[run.entry_id] = known._replace(tokens=index + 1)
        self.writes.append(Write(run.key, run.entry_id, run.key, index, ""))
        if step.last:
            self._forget(run.entry_id)
            self.writes.append(Write(run.key, run.entry_id, run.key, None, "done"))

    def _forget(self, entry_id: str) -> Run | None:
        self.running.discard(entry_id)
        self.opened.discard(entry_id)
        self.early.pop(entry_id, None)
        return self.known.pop(entry_id, None)

    def _end(self, cancel: Cancel) -> None:
        if cancel.elsewhere:
            self._forget(cancel.entry_id)
            self.fenced.discard(cancel.request_id)
        elif cancel.entry_id not in self.cut_short:
            known = self._forget(cancel.entry_id)
            if known is not None or cancel.unstarted:
                self.cut_short.add(cancel.entry_id)
                key = cancel.result_key if known is None else known.key
                self.writes.append(
                    Write(key, cancel.entry_id, cancel.request_id, None, cancel.code)
                )

    def _recover(self, item: RecoveryItem) -> None:
        stream = self.stream_of(item.stream)
        stream.epoch = max(stream.epoch, self.epoch)
        self.fenced.discard(item.stream)
        own = stream.entry_id == item.entry_id
        if own and stream.end:
            self.send(
                "admission", "finished", RequestFinished(item.request_id, item.entry_id), epoch=0
            )
            return
        tokens = stream.tokens if own else 0
        self.running.discard(item.entry_id)
        self.known.pop(item.entry_id, None)
        if tokens and item.entry_id in self.opened:
            self.known[item.entry_id] = Run(item.entry_id, item.stream, tokens)
        samples = (RecoveredSample(0, tuple(range(tokens)), False),) if tokens else ()
        self.send("admission", "finished", Recovered(item.key, samples))

    def ready(self) -> bool:
        return bool(self.writes)

    def work(self, choose: Callable[[int], int]) -> None:
        self.deliver(self.epoch)

    def deliver(self, epoch: int) -> None:
        """Writes what there is, then tells admission what has ended."""
        writes, self.writes = self.writes, []
        for write in writes:
            if self.stream_of(write.key).write(write.entry_id, write.index, write.end, epoch):
                if write.end:
                    finished = RequestFinished(write.request_id, write.entry_id)
                    self.send("admission", "finished", finished, epoch=0)
            elif write.key not in self.fenced:
                self.fenced.add(write.key)
                self.send(
                    "admission",
                    "finished",
                    Fenced((entry_key(write.entry_id, write.request_id),)),
                    epoch=epoch,
                )


def unstarted_if(dropped: bool, cancel: Cancel) -> Cancel:
    """Vouches that nothing of the request went further, if it was dropped here."""
    return msgspec.structs.replace(cancel, unstarted=True) if dropped else cancel
