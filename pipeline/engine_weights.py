"""New weights of `InferenceEngine`: fetched from their source, checked and converted."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..bus.control import UpdateWeights
from ..bus.weights import FolderWeights, GroupWeights, WeightsSource
from ..config import WeightsError
from ..stages.executor.changes.arguments import check_arguments
from ..stages.executor.parts.weights import WeightChanges
from ..stages.executor.runner.shards import NewWeight


def receive_weights(
    part: WeightChanges,
    source: Mapping[str, Tensor] | WeightsSource,
    version: int | None,
    timeout_s: float,
) -> dict[str, NewWeight]:
    """Return new weights, checked to be finite, in the model's dtypes and by its names.

    Blocks until they have come.

    Args:
        part: The executor's.
        source: As in `InferenceEngine.update_weights`, as the next two.
        version: The new version.
        timeout_s: Longest silence of a group.

    Raises:
        WeightsError: They can't be fetched or read, or don't fit; nothing has changed.
    """
    if not isinstance(source, Mapping | WeightsSource):
        raise WeightsError(
            f"new weights are a state dict, FolderWeights(path), SharedWeights(...).source or "
            f"WeightsGroup(...).broadcast(...).source, not {type(source).__name__}"
        )
    weights = part.manager
    try:
        weights.check_version(version)
    except WeightsError:
        if isinstance(source, GroupWeights):
            # Otherwise the next update would receive these.
            part.groups.skip(source.group)
        raise
    tensors: Mapping[str, NewWeight]
    if isinstance(source, Mapping):
        tensors = source
    else:
        check_arguments(UpdateWeights(source, timeout_s=timeout_s), weights.limits)
        from ..stages.executor.runner.weights.transports import fetch

        tensors = fetch(source, part.groups, timeout_s, weights.limits)
    return weights.prepare(tensors, checkpoint=isinstance(source, FolderWeights))
