"""Memory that is released for other users of the device, and allocated again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from ....bus.control import MemoryState, ReplicaCapacity
from ....bus.parts.memory import ReleasePlan
from ....config import WeightsError
from ..driver.step import LaunchedStep
from ..runner.memory import ReplicaMemory
from ..runner.weights.sync_manager import weights_lost
from . import ExecutorState, Part
from .weights import WeightChanges


class MemoryRelease(Part):
    """Releases memory when a plan says so; no step has rows until it is allocated again.

    Attributes:
        memory: The memory of the caches and of the weights.
    """

    reads = ReleasePlan
    changes: ClassVar[bool] = True

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        make: Callable[..., ReplicaMemory] = ReplicaMemory
        if state.ranks is not None:
            from ..runner.leader import LeaderMemory

            make = partial(LeaderMemory, state.ranks)
        self._weights = state.parts.get(WeightChanges).manager
        self.memory = make(
            state.caches, self._weights, huge_pages=state.config.huge_pages == "auto"
        )

    def state_now(self) -> MemoryState:
        """Return the message to batching about memory that is missing, or waits to be released."""
        return MemoryState(self.memory.lacks, tuple(self.memory.pending))

    def lacking(self, tags: Collection[str]) -> WeightsError:
        """Return the error of a call for which memory with these tags is missing."""
        if lost := self._weights.lost:
            return weights_lost(lost)
        return WeightsError(
            f"nothing can be generated: memory was released ({', '.join(tags)}); call "
            "resume_memory, and after the weights were released update_weights with all of them",
            code="memory_released",
        )

    def apply(self, section: ReleasePlan, step: LaunchedStep) -> None:
        if not self.memory.pending.intersection(section.tags):
            return
        for hook in self.state.parts.released:
            hook()
        self.memory.release(section.tags)

    def before(self, step: LaunchedStep) -> None:
        """Raises ValueError for rows while memory is missing."""
        if step.rows.size and not self.memory.runs:
            raise ValueError(f"the plan has rows, and the replica lacks {self.memory.lacks}")

    def resume(self, tags: Collection[str]) -> None:
        """Allocate released memory again.

        Raises:
            WeightsError: As `ReplicaMemory.resume`; or a part lacks memory.
        """
        self.memory.resume(tags)
        if not self.memory.released:
            for hook in self.state.parts.resumed:
                hook()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return replace(found, lacks=self.memory.lacks)
