"""New weights for an engine on its caller's thread, by the executor's own means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ..bus.control import JoinWeightsGroup, UpdateWeights
from ..bus.weights import FolderWeights, GroupWeights, WeightsSource
from ..config import WeightsError
from ..stages.executor.core import ExecutorCore
from ..stages.executor.weights import WeightGroups, WeightSyncManager, check_arguments, fetch

if TYPE_CHECKING:
    from torch import Tensor


def receive_weights(
    source: Mapping[str, Tensor] | WeightsSource,
    version: int | None,
    weights: WeightSyncManager,
    groups: WeightGroups,
    timeout_s: float,
) -> dict[str, Tensor]:
    """Weights that are checked to be finite, in the model's dtypes and by its names.

    Blocks until they are there.

    Args:
        source: The tensors, or where they are.
        version: What they are to be counted as.
        weights: Of the model that is to take them.
        groups: Those that the engine is in.
        timeout_s: How long others may be silent.

    Raises:
        WeightsError: They can't be taken now, are not to be had, or are not for this model.
    """
    if not isinstance(source, Mapping | WeightsSource):
        raise WeightsError(
            f"new weights are a state dict, FolderWeights(path), SharedWeights(...).source or "
            f"WeightsGroup(...).broadcast(...).source, not {type(source).__name__}"
        )
    try:
        weights.check_version(version)
    except WeightsError:
        if isinstance(source, GroupWeights):
            groups.skip(source.group)  # else these would be taken for the next ones
        raise
    if isinstance(source, Mapping):
        tensors = source
    else:
        check_arguments(UpdateWeights(source, timeout_s=timeout_s), weights.limits)
        tensors = fetch(source, groups, timeout_s, weights.limits)
    return weights.prepare(tensors, checkpoint=isinstance(source, FolderWeights))


class GroupMember:
    """The part of an engine that is about groups to which trainers broadcast."""

    _groups: WeightGroups

    @property
    def _executor(self) -> ExecutorCore:
        raise NotImplementedError

    def join_weights_group(
        self,
        group: str,
        address: str,
        world_size: int,
        *,
        rank: int = 1,
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout_s: float = 60.0,
    ) -> None:
        """Joins a torch.distributed group that a trainer broadcasts weights to (`WeightsGroup`).

        Args:
            group: Its name; one of this name that was joined before is left.
            address: host:port of the group's TCP store, which rank 0 keeps.
            world_size: How many there are, rank 0 included.
            rank: This engine's, at least 1.
            backend: "gloo", or "nccl" where trainer and engine have GPUs.
            timeout_s: How long to wait for the others.

        Raises:
            WeightsError: The group can't be, or the others did not come in time.
        """
        wish = JoinWeightsGroup(group, address, rank, world_size, backend, timeout_s)
        weights = self._executor.weights
        check_arguments(wish, weights.limits)
        self._groups.join(wish, weights.device).result()

    def leave_weights_group(self, group: str) -> None:
        """Leaves a group, if this engine is in it."""
        self._groups.leave(group)
