"""Experts of a mixture: their owners among the ranks, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....bus.control import ReplicaCapacity
from ....bus.parts.experts import ExpertCapacity, RoutedPrompts
from ....bus.sections import with_sections
from ....config import WeightsError, shown
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from ..runner.loaded_model import experts_of
from ..runner.routing import Routers
from ..runner.weights.checks import busy
from . import ExecutorState, Part
from .weights import WeightChanges

if TYPE_CHECKING:
    from ..runner.ranks.layers import ParallelExperts


class Experts(Part):
    """The experts of the model."""

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        model = state.model
        self._experts: list[ParallelExperts] = []
        if model.is_shard:
            from ..runner.sharded_model import experts_in

            self._experts = experts_in(model.module)
        self._number = experts_of(model.hf_config)[0]
        self._routers = Routers(model)
        if not self._routers.why_not:
            state.steps.routers = self._routers

    @property
    def owners(self) -> list[int]:
        """The rank of each expert of a layer; [] where they have none."""
        return list(self._experts[0].owners or ()) if self._experts else []

    def take_tokens(self) -> list[int]:
        """Return the tokens of each expert, over all layers, since the last call; [] without a
        count."""
        counts = [each.read_counts(reset=True) for each in self._experts]
        return [sum(each) for each in zip(*counts, strict=True)]

    def close(self) -> None:
        self._experts = []
        self.state.steps.routers = None

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        routers = self._routers
        about = routers.num_layers, routers.top_k, routers.why_not
        return with_sections(found, ExpertCapacity(self._number, *about)) if self._number else found

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        """Report the experts of prompts; those of sampled tokens are a column."""
        if step.outputs.experts:
            step.parts.append(RoutedPrompts(step.outputs.experts))


def move_experts(experts: Experts | None, owners: Sequence[int]) -> None:
    """Give experts other owners, between two steps. No token changes.

    Args:
        experts: The part; None if the model has no experts.
        owners: The rank of each expert of a layer; each rank owns equally many.

    Raises:
        WeightsError: Experts have no owners here, or these don't fit; or, as `weights_busy`, new
            weights wait for the next step.
        RankError: A rank has ended.
    """
    from ..runner import sharded_model
    from ..runner.ranks.commands import MoveExperts

    if experts is None or not (before := experts.owners) or (ranks := experts.state.ranks) is None:
        raise WeightsError(
            "experts have no owners here; set engine.expert_parallel to engine.tensor_parallel"
        )
    if sorted(owners) != sorted(before):
        size = len({*before})
        share = len(before) // size
        raise WeightsError(
            f"the owners of {len(before)} experts must be ranks below {size}, each of them "
            f"{share} times; got {shown(list(owners))}"
        )
    state = experts.state
    if state.parts.get(WeightChanges).manager.pending_receipt:
        raise busy()  # ranks hold parts of new weights for the owners of now
    ranks.tell(MoveExperts(tuple(owners)))
    sharded_model.move_experts(state.model.module, owners)
    if state.model.shards is not None:
        state.model.shards.layout += 1
