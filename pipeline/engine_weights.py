"""New weights for an engine on its caller's thread, by the executor's own means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..bus.control import UpdateWeights
from ..bus.weights import FolderWeights, GroupWeights, WeightsSource
from ..config import WeightsError
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
