"""An executor's weights without its shell, in which a test chooses the next event.

The core, what writes weights and what releases memory are the real ones. Jobs, plans and messages
wait until the test triggers them, in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from nano_inference.bus.control import (
    FinishUpdate,
    MemoryState,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
    WeightsReady,
)
from nano_inference.bus.envelope import Message
from nano_inference.bus.parts.weights import WeightsPlan
from nano_inference.bus.steps import StepPlan
from nano_inference.bus.weights import FolderWeights, StagedWeights
from nano_inference.config import WeightsError
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.changes import effects as do
from nano_inference.stages.executor.changes.core import ChangesCore
from nano_inference.stages.executor.changes.shell import check_fetched, replaces_weights
from nano_inference.stages.executor.changes.succession import supersedes
from nano_inference.stages.executor.runner.kv_cache import KVCache
from nano_inference.stages.executor.runner.memory import ReplicaMemory
from nano_inference.store.in_place import WeightsInPlace

Values = dict[str, float]
"""The values of the parameters."""


def _values(tensors: Mapping[str, torch.Tensor]) -> Values:
    return {name: tensor.max().item() for name, tensor in tensors.items()}


class Model(nn.Module):
    """Two parameters, a and b."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            self.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))

    def values(self) -> Values:
        return _values(dict(self.named_parameters()))


class NoCache:
    """A KV cache without tensors."""

    tensors: tuple[torch.Tensor, ...] = ()

    def moved(self) -> None:
        pass


class Tensors(dict[str, torch.Tensor]):
    """New weights that check that the version does not rise while they are read."""

    def __init__(self, values: Values, manager: WeightSyncManager) -> None:
        super().__init__({name: torch.full((2,), value) for name, value in values.items()})
        self._manager = manager

    def items(self) -> Any:
        return self._watched()

    def _watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        before = self._manager.version
        for item in super().items():
            yield item
            assert self._manager.version == before, "it was raised before the last tensor was there"


def place(number: int, names: str) -> FolderWeights:
    """The source of weights with this number in these parameters."""
    return FolderWeights(f"{number}:{names}")


def values_at(folder: str) -> Values:
    number, names = folder.split(":")
    return dict.fromkeys(names, float(number))


@dataclass(frozen=True)
class Plan:
    version: int
    release: tuple[str, ...]
    rows: bool


class Planner:
    """Batching's reaction to messages about weights and memory."""

    def __init__(self, lacks: tuple[str, ...] = ()) -> None:
        self.lacks = lacks
        self.release: tuple[str, ...] = ()
        self.new_version = 0
        self.under_way = 0

    def hear(self, message: Message) -> None:
        if isinstance(message, WeightsReady):
            self.new_version = message.version
        else:
            assert isinstance(message, MemoryState)
            self.lacks, self.release = message.lacks, message.release

    def plan(self) -> Plan | None:
        if self.under_way >= (1 if self.release else 2):
            return None
        if self.new_version:
            self.lacks = tuple(tag for tag in self.lacks if tag != "weights")
        plan = Plan(self.new_version, self.release, rows=not self.lacks)
        if not (plan.version or plan.release or plan.rows):
            return None
        self.new_version, self.release = 0, ()
        self.under_way += 1
        return plan


class World:
    """One executor.

    Attributes:
        jobs: Begun, not done.
        results: Done, and the core does not know.
        messages: On their way to batching.
        launched: Plans on their way to the model.
        executed: Plans that ran, with the version that they ran with; the core does not know.
        asked: The id of every operation.
        begun: Of those of the present executor, in order: an operation's ticket, less one, is the
            index of its id.
        answers: By operation id.
        contents: The expected values of the parameters, by version.
        counted: The version of each update that was made ready, by operation id.
        newest: The largest version that the core has reported.
        parts: Those that are kept by right, and of which update.
        restorable: Whether folders can still be read by a successor.
        logs: Whether there is a log of weights.
        unread: The updates whose decision the core wants to read.
        logged: The weights that the log has, by their place in it.
    """

    def __init__(self) -> None:
        self.now_ns = 1
        self.asked: list[str] = []
        self.answers: dict[str, do.Answer] = {}
        self.record: WeightsInPlace | None = None
        self.restorable = True
        self.logs = False
        self.unread: list[str] = []
        self.logged: dict[str, Values] = {}
        self.leader = "admission-1"
        self.start()

    def start(self) -> None:
        """Start a new executor, with the weights of model_path."""
        self.model = Model()
        self.manager = WeightSyncManager(self.model)
        self.memory = ReplicaMemory([cast(KVCache, NoCache())], self.manager)
        self.core = ChangesCore(self.manager.limits, logs=self.logs)
        self.begun: list[str] = []
        self.jobs: list[do.ChangeJob] = []
        self.results: list[tuple[do.ChangeJob, do.Result]] = []
        self.launched: deque[Plan] = deque()
        self.executed: deque[tuple[Plan, int]] = deque()
        self.counted: dict[str, int] = {}
        self.contents: dict[int, Values] = {0: self.model.values()}
        self.newest = 0
        self.fetched: set[str] = set()
        self.parts: tuple[str, list[Values]] = "", []
        self.begin_epoch()

    # --- events -------------------------------------------------------------------------------

    def ask(self, operation: Any) -> str:
        """Send an operation; return the id of its answer."""
        name = str(len(self.asked))
        self.asked.append(name)
        self.begun.append(name)
        self.perform(self.core.begin(operation, name, self.now_ns))
        return name

    def decide(self, update: str, version: int | None) -> None:
        """Tell the core what was decided, as the store has it."""
        if version and self.core.prepared == update:
            self.asked.append("")
            self.begun.append("")
        self.perform(self.core.decided(update, version, self.now_ns))

    def run_job(self, index: int = 0, *, fails: bool = False) -> None:
        """End a job, or fail it."""
        job = self.jobs.pop(index)
        result: do.Result
        try:
            if fails:
                raise WeightsError("it fails")
            result = self._run(job)
        except WeightsError as error:
            result = error
        self.results.append((job, result))

    def report_job(self, index: int = 0) -> None:
        """Report a job's result to the core."""
        job, result = self.results.pop(index)
        self.perform(self.core.done(job, result, self.now_ns))

    def deliver(self) -> None:
        """Deliver a message to batching."""
        self.planner.hear(self.messages.popleft())

    def launch(self) -> bool:
        """Have batching plan a step, if it can."""
        plan = self.planner.plan()
        if plan is not None:
            self.launched.append(plan)
        return plan is not None

    def execute(self) -> None:
        """Run a step, as `ExecutorCore.launch` does."""
        plan = self.launched.popleft()
        self.manager.finish_planned_sync(plan.version)
        if self.memory.pending.intersection(plan.release):
            self.memory.release(plan.release)
        assert self.memory.runs or not plan.rows, "a step without memory or weights"
        self.executed.append((plan, self.manager.version))

    def report_step(self) -> None:
        """Report a step to the core and to batching."""
        plan, version = self.executed.popleft()
        refused = self.manager.take_refused() if plan.version > version else None
        self.planner.under_way = max(0, self.planner.under_way - 1)
        done = StepPlan(0, (), (), (), (), (), (), (), 0, (WeightsPlan(plan.version),))
        pending = bool(self.memory.pending)
        effects = self.core.step_done(done, version, self.now_ns, pending, refused)
        self.perform(effects)

    def begin_epoch(self) -> None:
        """Fail a stage: batching restarts empty, and the executor joins again."""
        while self.launched:
            self.execute()
        self.messages: deque[Message] = deque()
        self.perform(self.core.succession.begin_epoch(self.leader))
        self.planner = Planner(self.memory.lacks)
        self.perform(self.core.epoch_begun(self.manager.version, self.now_ns))

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        deadline_ns = self.core.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self.now_ns:
            self.perform(self.core.tick(self.now_ns))

    def restart(self) -> None:
        """Replace the executor by a successor."""
        self.perform(self.core.close())
        assert not self.core.unanswered
        self.jobs, late = [], [(job, WeightsError("late")) for job in self.jobs]
        for job, result in [*self.results, *late]:
            assert not self.core.done(job, result, self.now_ns)
        self.start()

    def settle(self) -> None:
        """Run all possible events, in order, and let time pass until no deadline is left."""
        for _ in range(100):
            self.rest()
            if (deadline_ns := self.core.next_deadline_ns()) is None:
                return
            self.wait((deadline_ns - self.now_ns) / 1e9 + 1)
        raise AssertionError("it waits for ever")

    def rest(self) -> None:
        """Run all possible events, in order, without passing time."""
        for _ in range(1000):
            if self.jobs:
                self.run_job()
            elif self.results:
                self.report_job()
            elif self.messages:
                self.deliver()
            elif self.launched:
                self.execute()
            elif self.executed:
                self.report_step()
            elif not ((self.planner.new_version or self.planner.release) and self.launch()):
                return
        raise AssertionError("it never comes to rest")

    # --- effects ------------------------------------------------------------------------------

    def perform(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Answer():
                    self._take_answer(effect)
                case do.SendBatching(message):
                    self.messages.append(message)
                case do.SendMemory():
                    state = MemoryState(self.memory.lacks, tuple(self.memory.pending))
                    self.messages.append(state)
                case do.Remember(weights):
                    if supersedes(weights, self.record):
                        self.record = weights
                case do.ReadRecord():
                    self.perform(self.core.succession.read(self.record))
                case do.Restore(weights):
                    self.perform(self._restore(weights))
                case do.ReadDecision(update):
                    self.unread.append(update)
                case do.SkipBroadcast() | do.Leave() | do.Log():
                    pass
                case do.ChangeJob() as job:
                    if isinstance(job, do.Combine):
                        self._check_parts(job)
                    if isinstance(job, do.Fetch):
                        self.fetched.add(self.begun[job.ticket - 1])
                    self.jobs.append(job)

    def _check_parts(self, job: do.Combine) -> None:
        """Check that exactly the parts that were sent are kept."""
        source, (update, parts) = job.update.source, self.parts
        assert isinstance(source, StagedWeights)
        assert (source.update, source.parts) == (update, len(parts))
        whole = {name: value for part in parts for name, value in part.items()}
        assert _values(job.tensors) == whole
        self.parts = "", []

    def _take_answer(self, answer: do.Answer) -> None:
        name = answer.operation_id
        assert name not in self.answers, "a second answer"
        self.answers[name] = answer
        if answer.error is None and name in self.counted:
            assert answer.version >= self.counted[name], "it is answered before it is in place"
            assert self.manager.version >= self.counted[name]
        match answer.operation:
            case UpdateWeights(source=FolderWeights(path), part_of=update) if update:
                if answer.error is None:
                    kept = self.parts[1] if update == self.parts[0] else []
                    self.parts = update, [*kept, values_at(path)]
                elif name in self.fetched:
                    self.parts = "", []
            case UpdateWeights(source=StagedWeights()) if answer.error is not None:
                if answer.error.code == "weights_incomplete":
                    self.parts = "", []
            case ReleaseMemory(tags) if answer.error is None:
                assert self.memory.released.issuperset(tags), "it is answered before it is released"
            case ResumeMemory(tags) if answer.error is None:
                assert self.memory.released.isdisjoint(tags)
            case operation if answer.error is None and replaces_weights(operation):
                again = isinstance(operation, FinishUpdate)
                in_place = again and self.manager.version >= (operation.version or 0)
                assert name in self.counted or in_place, "nothing was put in place"

    def _run(self, job: do.ChangeJob) -> do.Result:
        manager = self.manager
        match job:
            case do.Fetch(_, update):
                assert isinstance(update.source, FolderWeights)
                path = update.source.path
                tensors = Tensors(values_at(path), manager)
                whole = len(tensors) == 2
                converted = whole or not update.part_of
                return do.Fetched(tensors, do.WeightsOrigin(path, "stamp"), whole, converted)
            case do.Combine(_, _, parts, origin, _):
                tensors = Tensors(_values(parts), manager)
                return do.Fetched(tensors, origin, manager.covers(manager.prepare(tensors)))
            case do.ReadLogged(_, _, logged):
                if logged not in self.logged:
                    raise WeightsError("not logged", code="weights_incomplete")
                return do.Fetched(Tensors(self.logged[logged], manager), None, True)
            case do.Check(_, update, fetched):
                check_fetched(update, fetched, manager)
            case do.Stage(ticket, update, fetched, version):
                counted = manager.start_sync(fetched.tensors, version, partial=update.partial)
                before = self.contents[manager.version]
                self.contents[counted] = {**before, **_values(fetched.tensors)}
                self.counted[self.begun[ticket - 1]] = counted
                return counted
            case do.BeginRelease(_, tags):
                self.memory.begin_release(tags)
                return bool(self.memory.pending)
            case do.ResumeTags(_, tags):
                self.memory.resume(tags)
        return None

    def _restore(self, weights: WeightsInPlace) -> list[do.Effect]:
        if not (self.restorable and weights.folder):
            return self.core.succession.fall_behind(weights.version, "they are gone")
        values = values_at(weights.folder)
        self.manager.sync_blocking(Tensors(values, self.manager), weights.version)
        self.contents[weights.version] = values
        return self.core.restored(weights)

    # --- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        unanswered = set(self.core.unanswered)
        assert unanswered.isdisjoint(self.answers)
        assert unanswered | set(self.answers) == set(self.asked)
        assert self.newest <= self.core.version <= self.manager.version
        self.newest = self.core.version
        assert self.manager.version in self.contents
        if "weights" not in self.memory.released and not self.manager.empty:
            assert self.model.values() == self.contents[self.manager.version]
        for name, counted in self.counted.items():
            refused = name in self.answers and self.answers[name].error is not None
            assert not refused or self.interrupted(name) or counted > self.manager.version
        fetching = [job for job in self._jobs_under_way() if isinstance(job, do.Fetch | do.Combine)]
        assert len(fetching) <= 1, "two sources at a time"

    def interrupted(self, name: str) -> bool:
        error = self.answers[name].error
        return error is not None and error.code == "weights_interrupted"

    def _jobs_under_way(self) -> list[do.ChangeJob]:
        return [*self.jobs, *(job for job, _ in self.results)]
