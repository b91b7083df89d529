"""The executor shell's part in weight updates and releases of memory, which `core` decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ....bus.control import FinishUpdate, MemoryState, UpdateWeights, WeightsReady
from ....bus.links import CONTROL
from ....bus.messages import Message, StepPlan
from ....bus.weights import FolderWeights, StagedWeights
from ....config import BusError, WeightsError, shown
from ....store.in_place import WeightsInPlace
from ....telemetry import instruments, names, now_ns
from ...actor import Actor
from ..runner.weights.conversion import PartsMissing
from ..runner.weights.sync_manager import WeightSyncManager
from ..runner.weights.transports import Background, WeightGroups, fetch, read_folder, stamp_of
from .arguments import Operation, check_path
from .core import UpdatesCore
from .effects import (
    Answer,
    BeginRelease,
    Check,
    Combine,
    Effect,
    Fetch,
    Fetched,
    Job,
    Join,
    Leave,
    Log,
    MakeReady,
    ReadRecord,
    Remember,
    Restore,
    Result,
    Resume,
    SendMemory,
    SendReady,
    SkipBroadcast,
)
from .parts import Origin
from .succession import supersedes

# How long the weights of a predecessor may take to be read.
_RESTORE_S = 300.0


class Memory(Protocol):
    """What of a lane's memory is there: `ReplicaMemory`, which knows this room."""

    @property
    def pending(self) -> Collection[str]:
        """What is to be released."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """What is released or to be released, and weights that hold nothing."""

    def begin_release(self, tags: Collection[str]) -> None:
        """From now on these are to be released. Raises WeightsError."""


class Executor(Protocol):
    """What updates need of an executor: `ExecutorCore`, which knows this room."""

    @property
    def weights(self) -> WeightSyncManager:
        """What writes new weights."""

    @property
    def memory(self) -> Memory:
        """What releases memory."""

    def resume_memory(self, tags: Collection[str]) -> None:
        """Takes memory again. Raises WeightsError."""


def stay_single() -> None:
    """Lets torch's functions start no parallel regions on this thread.

    Steps run on another one meanwhile, and two threads can't have a team of OpenMP's workers each
    without loss.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # That was for this thread, and for all that have not used torch yet. For those it is undone.
    undoing = threading.Thread(target=torch.set_num_threads, args=(threads,))
    undoing.start()
    undoing.join()


class WeightUpdates:
    """Does what the control messages about weights and memory ask for.

    Attributes:
        core: What decides.
    """

    def __init__(
        self,
        actor: Actor,
        executor: Executor,
        on_torch: Callable[..., Awaitable[Any]],
        start_soon: Callable[..., None],
    ) -> None:
        """Args: the stage and its core; what runs a function on its torch thread; what runs a
        coroutine function beside the stage, and ends with it."""
        self.core = UpdatesCore(executor.weights.limits)
        self._actor = actor
        self._executor = executor
        self._on_torch = on_torch
        self._start_soon = start_soon
        self._groups = WeightGroups()
        # Waits for bytes and makes tensors of them while the torch thread runs steps.
        self._thread = Background("weights", stay_single)
        # Set when there may be another deadline.
        self._changed = asyncio.Event()
        # Decided, and not yet sent.
        self._answers: list[Answer] = []
        self._restoring = ""

    @property
    def restoring(self) -> str:
        """Which weights of a predecessor are being read, as a sentence; "" when none are."""
        return self._restoring

    # --- events -------------------------------------------------------------------------------

    async def obey(self, operation: Operation, operation_id: str) -> None:
        """Begins what somebody asks for. It is answered under this id when it is done."""
        await self._perform(self.core.begin(operation, operation_id, now_ns()))

    async def begin_epoch(self, leader: str) -> None:
        """Puts the lane's weights in place, if this executor has joined it later than they came.

        To be called at the beginning of each epoch, when no plan is under way.
        """
        await self._perform(self.core.begin_epoch(leader))

    async def epoch_begun(self, version: int) -> None:
        """Tells batching what it has forgotten. `version`: of the weights in place."""
        await self._perform(self.core.epoch_begun(version, now_ns()))

    async def step_done(self, plan: StepPlan, version: int) -> None:
        """A plan has been executed, with weights of this version."""
        # Of another plan's there can't be any: one update waits for a plan at a time.
        refused = self._executor.weights.take_refused() if plan.weight_version > version else None
        effects = self.core.step_done(
            version,
            now_ns(),
            changed=plan.weight_version > 0,
            pending=bool(self._executor.memory.pending),
            refused=refused,
        )
        if effects:
            await self._perform(effects)

    async def weights_lost(self, error: WeightsError) -> None:
        """A plan was not executed, since its weights could not be written and none are in place."""
        self._actor.log.error("weights_lost", reason=error.message, exc_info=error.__cause__)
        await self._perform(self.core.weights_lost(error, now_ns()))

    def close(self) -> None:
        """Leaves all groups, so that nothing waits for a trainer any more."""
        del self._executor
        self._groups.close()
        self._thread.close()

    async def abandon(self) -> None:
        """Answers what will not be done any more, since the stage ends."""
        owed = [*self._answers, *self.core.close()]
        self._answers.clear()
        await self._perform(owed)

    async def tick_forever(self) -> None:
        """Sees to deadlines as they pass; to be run beside the stage."""
        while True:
            self._changed.clear()
            deadline_ns = self.core.next_deadline_ns()
            wait_s = None if deadline_ns is None else max(0, deadline_ns - now_ns()) / 1e9
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                await self._perform(self.core.tick(now_ns()))

    # --- effects ------------------------------------------------------------------------------

    async def _perform(self, effects: list[Effect]) -> None:
        self._changed.set()
        # Should the stage end meanwhile, these are still sent.
        self._answers += [effect for effect in effects if isinstance(effect, Answer)]
        for effect in effects:
            match effect:
                case Answer():
                    self._answers.remove(effect)
                    await self._answer(effect)
                case SendReady(version, in_flight):
                    await self._tell_batching(WeightsReady(version, in_flight))
                case SendMemory():
                    memory = self._executor.memory
                    await self._tell_batching(MemoryState(memory.lacks, tuple(memory.pending)))
                case SkipBroadcast(group):
                    self._groups.skip(group)
                case Leave(group):
                    self._groups.leave(group)
                case Log(event, fields, warning):
                    write = self._actor.log.warning if warning else self._actor.log.info
                    write(event, **fields)
                case Remember(weights):
                    await self._remember(weights)
                case ReadRecord():
                    await self._perform(self.core.record_read(await self._record()))
                case Restore(weights):
                    await self._perform(await self._restore(weights))
                case job:
                    self._start_soon(self._work, job)

    async def _answer(self, answer: Answer) -> None:
        operation, error = answer.operation, answer.error
        if error is not None:
            self._actor.log.warning(
                "operation_refused",
                operation=type(operation).__name__,
                code=error.code,
                reason=error.message,
                exc_info=error.__cause__,
            )
        if _is_an_update(operation) or (error and isinstance(operation, UpdateWeights)):
            labels = {names.ERROR_TYPE: error.code if error else ""}
            self._actor.metrics.record(instruments.WEIGHT_UPDATES, 1, labels)
        await self._actor.answer(answer.operation_id, answer.version, error, answer.newest_version)

    async def _tell_batching(self, message: Message) -> None:
        await self._actor.send(self._actor.own(CONTROL["batching"]), message)

    async def _remember(self, weights: WeightsInPlace) -> None:
        record = self._actor.bus.store.weights
        try:
            if supersedes(weights, await record.read()):
                await record.put(weights)
        except BusError as error:
            # Nobody loses anything by it but a successor, which serves what it loads.
            self._actor.log.warning("weights_not_remembered", reason=error.message)

    async def _record(self) -> WeightsInPlace | None:
        try:
            return await self._actor.bus.store.weights.read()
        except BusError as error:
            self._actor.log.warning("weights_of_the_lane_unknown", reason=error.message)
            return None

    async def _restore(self, weights: WeightsInPlace) -> list[Effect]:
        self._restoring = f"it reads the weights of version {weights.version} from {weights.folder}"
        manager = self._executor.weights
        try:
            async with asyncio.timeout(_RESTORE_S):
                tensors = await self._in_background(_read_again, weights, manager)
            await self._on_torch(manager.sync_blocking, tensors, weights.version)
        except (WeightsError, TimeoutError) as error:
            why = error.message if isinstance(error, WeightsError) else "reading took too long"
            return self.core.not_restored(weights, why)
        finally:
            self._restoring = ""
        return self.core.restored(weights)

    # --- jobs ---------------------------------------------------------------------------------

    async def _work(self, job: Job) -> None:
        """Whatever goes wrong before weights are changed is an answer. What goes wrong while memory
        is released or taken again is raised, unless it is a WeightsError: nobody knows then what
        the executor has."""
        result: Result
        try:
            result = await self._result(job)
        except Exception as error:
            memory = isinstance(job, BeginRelease | Resume)
            if memory and not isinstance(error, WeightsError):
                raise
            result = _refusal(error)
        await self._perform(self.core.done(job, result, now_ns()))

    async def _result(self, job: Job) -> Result:
        executor, weights = self._executor, self._executor.weights
        match job:
            case Fetch(_, update):
                started = now_ns()
                fetched: Fetched = await self._in_background(self._fetch, update, weights)
                self._actor.metrics.record(instruments.WEIGHT_FETCH, (now_ns() - started) / 1e9)
                return fetched
            case Combine(_, _, tensors, origin):
                prepared = await self._in_background(weights.prepare, tensors)
                return Fetched(prepared, origin, weights.covers(prepared))
            case Check(_, update, fetched):
                await self._on_torch(_check, update, fetched, weights)
            case MakeReady(_, update, fetched, version):
                start = partial(weights.start_sync, partial=update.partial)
                counted: int = await self._on_torch(start, fetched.tensors, version)
                return counted
            case Join(_, wish):
                await asyncio.wrap_future(self._groups.join(wish, weights.device))
            case BeginRelease(_, tags):
                await self._on_torch(executor.memory.begin_release, tags)
                return bool(executor.memory.pending)
            case Resume(_, tags):
                await self._on_torch(executor.resume_memory, tags)
        return None

    async def _in_background(self, function: Callable[..., Any], *args: Any) -> Any:
        """Raises WeightsError, whatever the function raises."""
        try:
            return await asyncio.wrap_future(self._thread.submit(function, *args))
        except WeightsError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    def _fetch(self, update: UpdateWeights, weights: WeightSyncManager) -> Fetched:
        """On the thread that fetches."""
        source = update.source
        assert not isinstance(source, StagedWeights)
        folder = source.path if isinstance(source, FolderWeights) else ""
        # Before they are read: what is written anew meanwhile will not have this stamp.
        origin = Origin(folder, stamp_of(folder, weights.limits)) if folder else None
        tensors = fetch(source, self._groups, update.timeout_s, weights.limits)
        try:
            prepared = weights.prepare(tensors, checkpoint=bool(folder))
        except PartsMissing:
            if not update.part_of:
                raise
            return Fetched(tensors, origin, covers=False, converted=False)
        return Fetched(prepared, origin, weights.covers(prepared))


def _check(update: UpdateWeights, fetched: Fetched, weights: WeightSyncManager) -> None:
    """Raises WeightsError when a part, or all of an update, could not be put in place."""
    if update.part_of:
        weights.check(fetched.tensors, partial=True)
        return
    weights.check_version(update.version)
    weights.check(fetched.tensors, partial=update.partial)
    weights.check_complete(fetched.tensors)


def _refusal(error: Exception) -> WeightsError:
    """What its sender is told of an error."""
    if isinstance(error, WeightsError):
        return error
    refusal = WeightsError(
        f"the executor could not do it ({type(error).__name__}: {shown(str(error))}); its log has "
        "the traceback, and its weights are as they were"
    )
    refusal.__cause__ = error
    return refusal


def _is_an_update(operation: Operation) -> bool:
    """Whether weights are in place when it is done."""
    match operation:
        case FinishUpdate(version=version):
            return version is not None
        case UpdateWeights(part_of=part, prepare_as=name):
            return not part and not name
    return False


def _read_again(record: WeightsInPlace, weights: WeightSyncManager) -> dict[str, Tensor]:
    """The weights that an earlier executor read from a folder.

    Raises:
        WeightsError: They are not there any more.
    """
    if not record.folder:
        raise WeightsError("they did not come from a folder as a whole")
    check_path(record.folder)
    changed = f"the files of {record.folder} are others than they were"
    if stamp_of(record.folder, weights.limits) != record.stamp:
        raise WeightsError(changed)
    read = read_folder(record.folder, weights.limits)
    tensors = weights.prepare(read, checkpoint=True)
    if stamp_of(record.folder, weights.limits) != record.stamp:
        raise WeightsError(changed)
    return tensors
