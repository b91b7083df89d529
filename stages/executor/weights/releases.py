"""The executor shell's part in releasing memory: have batching plan it, and say what there is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

from ....bus.control import MemoryState, ReleaseMemory, ResumeMemory
from ....bus.links import CONTROL
from ....bus.messages import StepPlan
from ...actor import Actor
from .sync_manager import WeightSyncManager


class Memory(Protocol):
    """What of a lane's memory is there: `LaneMemory`, which knows this room."""

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


class MemoryReleases:
    """Releases memory and takes it again, one change at a time.

    To release it batching is told, and plans no more steps; when none is under way its next plan
    says that the memory be released. Only batching can tell whose KV that is.
    """

    def __init__(self, actor: Actor, on_torch: Callable[..., Awaitable[Any]]) -> None:
        """Args: the stage, and what runs a function on its torch thread."""
        self._actor = actor
        self._on_torch = on_torch
        self._turn = asyncio.Lock()
        self._done = asyncio.Event()

    async def obey(self, operation: ReleaseMemory | ResumeMemory, core: Executor) -> None:
        """Returns when it is done.

        Raises:
            WeightsError: As `LaneMemory.begin_release` and `LaneMemory.resume`.
        """
        async with self._turn:
            if isinstance(operation, ResumeMemory):
                try:
                    await self._on_torch(core.resume_memory, operation.tags)
                finally:
                    await self.tell(core)  # part of it may be there
                return
            self._done.clear()
            await self._on_torch(core.memory.begin_release, operation.tags)
            if core.memory.pending:
                await self.tell(core)
                await self._done.wait()

    async def tell(self, core: Executor) -> None:
        """Tells batching what there is, and what it is to have released."""
        state = MemoryState(core.memory.lacks, tuple(core.memory.pending))
        await self._actor.send(self._actor.own(CONTROL["batching"]), state)

    async def plan_done(self, plan: StepPlan, core: Executor) -> None:
        """A plan has been executed."""
        if plan.weight_version:
            # Batching went by it already, and may have heard of the weights before since.
            await self.tell(core)
        if plan.release and not core.memory.pending:
            self._done.set()
