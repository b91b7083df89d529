"""The executor shell's part in a weight update: fetch, have batching plan the change, answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...bus.links import CONTROL
from ...bus.messages import (
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    ResumeMemory,
    TellWeightVersion,
    UpdateWeights,
    WeightsStaged,
)
from ...bus.weights import (
    FolderWeights,
    GroupWeights,
    LocalWeights,
    StagedWeights,
    WeightsSource,
)
from ...config import WeightsError
from ...telemetry import instruments, names, now_ns
from ..actor import Actor
from .core import ExecutorCore
from .naming import PartsMissing
from .parts import WeightParts
from .releases import MemoryReleases
from .transports import Background, WeightGroups, fetch
from .weights import WeightSyncManager

Operation = (
    UpdateWeights
    | JoinWeightsGroup
    | LeaveWeightsGroup
    | TellWeightVersion
    | ReleaseMemory
    | ResumeMemory
)


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


class WeightUpdates:
    """Does what the control messages about weights ask for, one at a time, and has memory released.

    An update has three steps. The tensors are fetched while plans run. Batching is told, and its
    next plan says that they be put in place; only it can tell which KV is older. When that plan's
    result is there, whoever asked gets the answer.

    An update may come in parts, which are fetched and kept until `StagedWeights` asks for all.

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
        # What batching has been told of, with the version that it will have.
        self._staged: tuple[UpdateWeights, int] | None = None
        self._parts = WeightParts()

    async def obey(self, operation: Operation, core: ExecutorCore) -> None:
        """Does it, and answers unless the answer comes later."""
        weights = core.weights
        self._unanswered[id(operation)] = operation
        done = True
        try:
            match operation:
                case UpdateWeights(part_of=update) if update:
                    await self._keep_part(operation, weights)
                case UpdateWeights():
                    await self._update(operation, weights)
                    done = False
                case JoinWeightsGroup():
                    await self._fetch(self._groups.join, operation, weights.device)
                case LeaveWeightsGroup(group):
                    self._groups.leave(group)
                case ReleaseMemory() | ResumeMemory():
                    await self.memory.obey(operation, core)
        except WeightsError as error:
            self._actor.log.warning(
                "operation_refused",
                operation=type(operation).__name__,
                code=error.code,
                reason=error.message,
            )
            await self._answer(operation, weights.version, error)
        else:
            if done:
                await self._answer(operation, weights.version)

    async def stage(self) -> None:
        """Tells batching of an update that is still to be put in place, if there is one."""
        if self._staged is not None:
            update, version = self._staged
            staged = WeightsStaged(version, update.in_flight)
            await self._actor.send(self._actor.own(CONTROL["batching"]), staged)

    async def in_place(self, version: int) -> None:
        """The weights of this version made the last step."""
        if self._staged is not None and version >= self._staged[1]:
            (update, _), self._staged = self._staged, None
            self._actor.log.info("weights_in_place", version=version)
            await self._answer(update, version)

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
        async with self._fetching:
            try:
                tensors = await self._receive(update, weights)
                if not isinstance(tensors, _Unconverted):
                    await self._on_torch(partial(weights.check, partial=True), tensors)
            except WeightsError:
                self._parts.drop()  # they will never be all
                raise
            self._parts.add(update.part_of, tensors)

    async def _update(self, update: UpdateWeights, weights: WeightSyncManager) -> None:
        if self._fetching.locked() or self._staged is not None:
            if isinstance(update.source, GroupWeights):
                self._groups.skip(update.source.group)
            raise WeightsError(
                "a weight update is under way already; wait until it is in place",
                code="weights_busy",
            )
        async with self._fetching:
            tensors = await self._receive(update, weights)
            start = partial(weights.start_sync, partial=update.partial)
            version = await self._on_torch(start, tensors, update.version)
            self._staged = update, version
        await self.stage()

    def _prepare(
        self, source: WeightsSource, update: UpdateWeights, weights: WeightSyncManager
    ) -> dict[str, Tensor]:
        tensors = fetch(source, self._groups, update.timeout_s)
        try:
            return weights.prepare(tensors, checkpoint=isinstance(source, FolderWeights))
        except PartsMissing:
            if not update.part_of:
                raise
            return _Unconverted(tensors)

    async def _receive(
        self, update: UpdateWeights, weights: WeightSyncManager
    ) -> dict[str, Tensor]:
        source = update.source
        if isinstance(source, StagedWeights):
            # Now that all are there, what could not be converted by itself can be.
            parts = self._parts.take(source)
            whole: dict[str, Tensor] = await self._fetch(weights.prepare, parts)
            return whole
        started = now_ns()
        tensors: dict[str, Tensor] = await self._fetch(self._prepare, source, update, weights)
        self._actor.metrics.record(instruments.WEIGHT_FETCH, (now_ns() - started) / 1e9)
        return tensors

    async def _fetch(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(function, *args))

    def close(self) -> None:
        """Leaves all groups, so that nothing waits for a trainer any more."""
        self._groups.close()
        self._thread.close()

    async def _answer(
        self, operation: Operation, version: int, error: WeightsError | None = None
    ) -> None:
        self._unanswered.pop(id(operation), None)
        if isinstance(operation, UpdateWeights) and (error or not operation.part_of):
            labels = {names.ERROR_TYPE: error.code if error else ""}
            self._actor.metrics.record(instruments.WEIGHT_UPDATES, 1, labels)
        await self._actor.answer(operation.operation_id, version, error)
