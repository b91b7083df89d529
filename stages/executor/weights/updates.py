"""The executor shell's part in a weight update: fetch, have batching plan the change, answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ....bus import WeightsInPlace
from ....bus.control import (
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
    WeightsReady,
)
from ....bus.links import CONTROL
from ....bus.weights import (
    FolderWeights,
    GroupWeights,
    InFlight,
    LocalWeights,
    StagedWeights,
    WeightsSource,
)
from ....config import WeightsError, shown
from ....telemetry import instruments, names, now_ns
from ...actor import Actor
from .arguments import Operation, check_arguments, check_path
from .conversion import PartsMissing
from .parts import Origin, WeightParts
from .releases import Executor, MemoryReleases
from .succession import Succession
from .sync_manager import WeightSyncManager
from .transports import Background, WeightGroups, fetch, read_folder, stamp_of

# How long the weights of a predecessor may take to be read.
_RESTORE_S = 300.0

# What an update has for its fetching that has waited for its turn to the last moment.
_LEAST_FETCH_S = 0.001


def _stay_single() -> None:
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


class _Unconverted(dict[str, Tensor]):
    """Tensors of an update's part, by a checkpoint's names, that take other parts to convert."""


class _Fetched(NamedTuple):
    """New weights in this process, and where they can be had again."""

    tensors: dict[str, Tensor]
    origin: Origin | None


class _Prepared(NamedTuple):
    """Weights that wait for `FinishUpdate`. `expiry` drops them when that does not come."""

    update: UpdateWeights
    fetched: _Fetched
    expiry: asyncio.TimerHandle


class _Staged(NamedTuple):
    """What batching has been told of, for whom, and the version that it will have."""

    operation: UpdateWeights | FinishUpdate
    in_flight: InFlight
    version: int
    origin: Origin | None


class WeightUpdates:
    """Does what the control messages about weights ask for, one at a time, and has memory released.

    An update has three steps. The tensors are fetched while plans run. Batching is told, and its
    next plan says that they be put in place; only it can tell which KV is older. When that plan's
    result is there, whoever asked gets the answer.

    An update may come in parts, which are fetched and kept until `StagedWeights` asks for all. One
    that other executors make as well is fetched and kept until `FinishUpdate`, so that it can still
    be given up when another executor refuses it.

    Attributes:
        memory: What releases memory.
    """

    def __init__(self, actor: Actor, on_torch: Callable[..., Awaitable[Any]]) -> None:
        """Args: the stage, and what runs a function on its torch thread."""
        self.memory = MemoryReleases(actor, on_torch)
        self._actor = actor
        self._on_torch = on_torch
        self._fetching = asyncio.Lock()
        self._groups = WeightGroups()
        # Waits for bytes and makes tensors of them while the torch thread runs steps.
        self._thread = Background("weights", _stay_single)
        self._unanswered: dict[int, Operation] = {}
        self._staged: _Staged | None = None
        self._prepared: _Prepared | None = None
        # Of an update that was given up while it was still fetched.
        self._given_up = ""
        self._parts = WeightParts()
        self._succession = Succession(actor)
        self._restoring = ""

    @property
    def behind(self) -> int:
        """See `Succession.behind`."""
        return self._succession.behind

    @property
    def restoring(self) -> str:
        """Which weights of a predecessor are being read, as a sentence; "" when none are."""
        return self._restoring

    async def catch_up(self, weights: WeightSyncManager) -> None:
        """Puts the lane's weights in place, if this executor has joined it later than they came.

        To be called at the beginning of each epoch, when no plan is under way.
        """
        found = await self._succession.inherited()
        if found is None:
            return
        self._restoring = f"it reads the weights of version {found.version} from {found.folder}"
        try:
            async with asyncio.timeout(_RESTORE_S):
                tensors = await self._fetch(_read_again, found, weights)
            await self._on_torch(weights.sync_blocking, tensors, found.version)
        except (WeightsError, TimeoutError) as error:
            why = error.message if isinstance(error, WeightsError) else "reading took too long"
            self._succession.fall_behind(found.version, why)
        else:
            self._actor.log.info("weights_restored", version=found.version, folder=found.folder)
            origin = Origin(found.folder, found.stamp)
            await self._succession.remember(found.version, origin)
        finally:
            self._restoring = ""

    async def obey(self, operation: Operation, core: Executor) -> None:
        """Does it, and answers unless the answer comes later.

        Whatever goes wrong before weights are changed is an answer. What goes wrong while memory
        is released or taken again is raised, unless it is a WeightsError: nobody knows then what
        the executor has.
        """
        self._unanswered[id(operation)] = operation
        try:
            self._check(operation, core.weights)
            done = await self._do(operation, core)
        except Exception as error:
            memory = isinstance(operation, ReleaseMemory | ResumeMemory)
            if memory and not isinstance(error, WeightsError):
                raise
            await self._refuse(operation, core.weights.version, error)
            return
        if done:
            await self._answer(operation, core.weights.version)
        else:
            await self.stage()

    async def _do(self, operation: Operation, core: Executor) -> bool:
        """Returns whether it is done; else it will be when the next plan is."""
        weights = core.weights
        match operation:
            case UpdateWeights(part_of=update) if update:
                await self._keep_part(operation, weights)
            case UpdateWeights(prepare_as=name) if name:
                await self._prepare_update(operation, weights)
            case UpdateWeights():
                await self._update(operation, weights)
                return False
            case FinishUpdate():
                await self._finish(operation, weights)
                return operation.version is None
            case JoinWeightsGroup():
                await asyncio.wrap_future(self._groups.join(operation, weights.device))
            case LeaveWeightsGroup(group):
                self._groups.leave(group)
            case ReleaseMemory() | ResumeMemory():
                await self.memory.obey(operation, core)
        return True

    def _check(self, operation: Operation, weights: WeightSyncManager) -> None:
        try:
            check_arguments(operation, weights.limits)
        except WeightsError:
            if isinstance(operation, UpdateWeights):
                self._miss(operation)
            raise

    async def _refuse(self, operation: Operation, version: int, error: Exception) -> None:
        refusal = _refusal(error)
        self._actor.log.warning(
            "operation_refused",
            operation=type(operation).__name__,
            code=refusal.code,
            reason=refusal.message,
            exc_info=refusal.__cause__,
        )
        await self._answer(operation, version, refusal)

    async def stage(self) -> None:
        """Tells batching of an update that is still to be put in place, if there is one."""
        if self._staged is not None:
            staged = WeightsReady(self._staged.version, self._staged.in_flight)
            await self._actor.send(self._actor.own(CONTROL["batching"]), staged)

    async def in_place(self, version: int) -> None:
        """The weights of this version made the last step."""
        if self._staged is not None and version >= self._staged.version:
            staged, self._staged = self._staged, None
            self._actor.log.info("weights_in_place", version=version)
            await self._succession.remember(version, staged.origin)
            await self._answer(staged.operation, version)

    async def abandon(self, version: int) -> None:
        """Answers what will not be done any more, since the stage ends."""
        why = WeightsError(
            "the executor stopped before it was done; it starts again with all its memory and the "
            "weights of model_path, as version 0",
            code="weights_interrupted",
        )
        for operation in list(self._unanswered.values()):
            await self._answer(operation, version, why)

    async def _keep_part(self, update: UpdateWeights, weights: WeightSyncManager) -> None:
        if isinstance(update.source, LocalWeights):
            raise WeightsError(
                "a state dict of this process can't be a part of an update, since it may change "
                "until the others come; pass all tensors at once"
            )
        left_s = await self._take_turn(update)
        try:
            update = msgspec.structs.replace(update, timeout_s=left_s)
            tensors, origin = await self._receive(update, weights)
            if not isinstance(tensors, _Unconverted):
                await self._on_torch(partial(weights.check, partial=True), tensors)
            self._parts.add(update.part_of, tensors, origin, weights.limits)
        except Exception:
            self._parts.drop()  # they will never be all
            raise
        finally:
            self._fetching.release()

    async def _take_turn(self, update: UpdateWeights) -> float:
        """Waits until nothing else is fetched; returns how many seconds the update has left.

        Raises:
            WeightsError: Something else was fetched all the time that the update had.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + update.timeout_s
        try:
            async with asyncio.timeout_at(end):
                await self._fetching.acquire()
        except TimeoutError:
            self._miss(update)
            raise _busy() from None
        return max(end - loop.time(), _LEAST_FETCH_S)

    async def _update(self, update: UpdateWeights, weights: WeightSyncManager) -> None:
        self._refuse_if_busy(update)
        async with self._fetching:
            fetched = await self._receive(update, weights)
            await self._start(update, update, fetched, update.version, weights)

    async def _prepare_update(self, update: UpdateWeights, weights: WeightSyncManager) -> None:
        self._refuse_if_busy(update)
        async with self._fetching:
            fetched = await self._receive(update, weights)
            await self._on_torch(weights.check_version, update.version)
            await self._on_torch(partial(weights.check, partial=update.partial), fetched.tensors)
            weights.check_complete(fetched.tensors)
            self._succession.check(weights.covers(fetched.tensors))
            if update.prepare_as == self._given_up:
                raise WeightsError("the update was given up", code="weights_incomplete")
            loop = asyncio.get_running_loop()
            expiry = loop.call_later(update.timeout_s, self._drop_prepared)
            self._prepared = _Prepared(update, fetched, expiry)

    async def _finish(self, finish: FinishUpdate, weights: WeightSyncManager) -> None:
        prepared = self._prepared
        if prepared is None or prepared.update.prepare_as != finish.prepared:
            if finish.version is None:
                self._given_up = finish.prepared
                return
            raise WeightsError(
                "the weights that this executor had prepared are not there any more: it was "
                "started anew, or was not told in time to put them in place; send them again",
                code="weights_incomplete",
            )
        prepared.expiry.cancel()
        try:
            if finish.version is not None:
                update, fetched, _ = prepared
                await self._start(finish, update, fetched, finish.version, weights)
        finally:
            self._prepared = None

    def _drop_prepared(self) -> None:
        self._prepared = None
        self._actor.log.warning("prepared_weights_dropped", reason="nobody asked for them")

    def _refuse_if_busy(self, update: UpdateWeights) -> None:
        if self._fetching.locked() or self._staged is not None or self._prepared is not None:
            self._miss(update)
            raise _busy()

    def _miss(self, update: UpdateWeights) -> None:
        """What it broadcasts is received by nobody, and must not be taken for what comes later."""
        if isinstance(update.source, GroupWeights):
            self._groups.skip(update.source.group)

    async def _start(
        self,
        operation: UpdateWeights | FinishUpdate,
        update: UpdateWeights,
        fetched: _Fetched,
        version: int | None,
        weights: WeightSyncManager,
    ) -> None:
        """Has the weights wait for the next plan."""
        tensors, origin = fetched
        covers = weights.covers(tensors)
        self._succession.check(covers)
        if version is None and self.behind:
            version = self.behind + 1  # a number that the lane has had means other weights
        start = partial(weights.start_sync, partial=update.partial)
        counted = await self._on_torch(start, tensors, version)
        self._staged = _Staged(operation, update.in_flight, counted, origin if covers else None)

    def _prepare(
        self, source: WeightsSource, update: UpdateWeights, weights: WeightSyncManager
    ) -> _Fetched:
        folder = source.path if isinstance(source, FolderWeights) else ""
        # Before they are read: what is written anew meanwhile will not have this stamp.
        origin = Origin(folder, stamp_of(folder, weights.limits)) if folder else None
        tensors = fetch(source, self._groups, update.timeout_s, weights.limits)
        try:
            return _Fetched(weights.prepare(tensors, checkpoint=bool(folder)), origin)
        except PartsMissing:
            if not update.part_of:
                raise
            return _Fetched(_Unconverted(tensors), origin)

    async def _receive(self, update: UpdateWeights, weights: WeightSyncManager) -> _Fetched:
        source = update.source
        if isinstance(source, StagedWeights):
            # Now that all are there, what could not be converted by itself can be.
            parts, origin = self._parts.take(source)
            return _Fetched(await self._fetch(weights.prepare, parts), origin)
        started = now_ns()
        fetched: _Fetched = await self._fetch(self._prepare, source, update, weights)
        self._actor.metrics.record(instruments.WEIGHT_FETCH, (now_ns() - started) / 1e9)
        return fetched

    async def _fetch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Raises WeightsError, whatever the function raises."""
        try:
            return await asyncio.wrap_future(self._thread.submit(function, *args))
        except WeightsError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    def close(self) -> None:
        """Leaves all groups, so that nothing waits for a trainer any more."""
        self._groups.close()
        self._thread.close()
        if self._prepared is not None:
            self._prepared.expiry.cancel()

    async def _answer(
        self, operation: Operation, version: int, error: WeightsError | None = None
    ) -> None:
        self._unanswered.pop(id(operation), None)
        if _is_an_update(operation) or (error and isinstance(operation, UpdateWeights)):
            labels = {names.ERROR_TYPE: error.code if error else ""}
            self._actor.metrics.record(instruments.WEIGHT_UPDATES, 1, labels)
        await self._actor.answer(operation.operation_id, version, error, self.behind)


def _busy() -> WeightsError:
    return WeightsError(
        "a weight update is under way already; wait until it is in place", code="weights_busy"
    )


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
    if isinstance(operation, FinishUpdate):
        return operation.version is not None
    return isinstance(operation, UpdateWeights) and not (operation.part_of or operation.prepare_as)


def _read_again(found: WeightsInPlace, weights: WeightSyncManager) -> dict[str, Tensor]:
    """The weights that an earlier executor read from a folder.

    Raises:
        WeightsError: They are not there any more.
    """
    if not found.folder:
        raise WeightsError("they did not come from a folder as a whole")
    check_path(found.folder)
    changed = f"the files of {found.folder} are others than they were"
    if stamp_of(found.folder, weights.limits) != found.stamp:
        raise WeightsError(changed)
    read = read_folder(found.folder, weights.limits)
    tensors = weights.prepare(read, checkpoint=True)
    if stamp_of(found.folder, weights.limits) != found.stamp:
        raise WeightsError(changed)
    return tensors
