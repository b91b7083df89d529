"""New weights, put in place between two steps."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from ....bus.control import ReplicaCapacity
from ....bus.parts.weights import WeightsPlan
from ....config import WeightsError
from ..driver.step import LaunchedStep
from ..runner.weights.checks import limits_of
from ..runner.weights.sync_manager import WeightSyncManager
from . import ExecutorState, Part

if TYPE_CHECKING:
    from ..runner.weights.transports.group import WeightGroups


class WeightChanges(Part):
    """Puts staged weights in place when a plan names their version.

    Attributes:
        manager: Stages and writes them.
    """

    reads = WeightsPlan
    changes: ClassVar[bool] = True

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        model, config = state.model, state.config
        limits = limits_of(model.whole, config.max_weight_tensors, config.max_weight_bytes)
        write = None
        if state.ranks and model.shards:
            from ..runner.rank_weights import write_to_ranks

            write = partial(write_to_ranks, state.ranks, model.shards)
        self.manager = WeightSyncManager(model.module, limits, shards=model.shards, write=write)

    @cached_property
    def groups(self) -> WeightGroups:
        """Groups of trainers, joined by each rank."""
        ranks, shards = self.state.ranks, self.state.model.shards
        if ranks is not None and shards is not None:
            from ..runner.rank_weights import LeaderGroups

            return LeaderGroups(ranks, shards)
        from ..runner.weights.transports.group import WeightGroups

        return WeightGroups()

    def close(self) -> None:
        if "groups" in vars(self):
            self.groups.close()

    def apply(self, section: WeightsPlan, step: LaunchedStep) -> None:
        """Finish a planned update (`WeightSyncManager.finish_planned_sync`); after its error no
        plan runs until a reset.

        Raises:
            WeightsError: No weights are in place.
        """
        try:
            self.manager.finish_planned_sync(section.version)
        except WeightsError as error:
            self.state.blocked = error
            raise
        for hook in self.state.parts.replaced:
            hook()

    def launched(self, step: LaunchedStep) -> None:
        step.weight_version = self.manager.version

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return replace(found, weight_version=self.manager.version)
