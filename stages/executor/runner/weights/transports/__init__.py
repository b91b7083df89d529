"""The ways by which new weights reach the executor's process: a module for each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ......bus.weights import (
    FolderWeights,
    GroupWeights,
    LocalWeights,
    SharedMemoryWeights,
    WeightsSource,
    laid_down,
)
from ......config import WeightsError
from ..limits import UNLIMITED, WeightLimits
from .background import Background
from .folder import read_folder, stamp_of
from .group import WeightGroups
from .rendezvous import BACKENDS, host_and_port
from .shared_memory import SharedWeights, read_shared_memory
from .trainer_group import Sending, WeightsGroup


def fetch(
    source: WeightsSource,
    groups: WeightGroups,
    timeout_s: float,
    limits: WeightLimits = UNLIMITED,
) -> Mapping[str, Tensor]:
    """The tensors of a source, by name, in memory that nobody else writes to.

    Blocks; where it waits for others, at most about `timeout_s`. What fails leaves nothing behind.

    Raises:
        WeightsError: They are not there, are not what the source says, are more than the limits
            allow, or did not come in time.
    """
    match source:
        case FolderWeights(path):
            return read_folder(path, limits)
        case LocalWeights(key):
            if (weights := laid_down(key)) is None:
                raise WeightsError(
                    "the weights are not in the executor's process; send them through shared "
                    "memory, a group or a folder"
                )
            return weights
        case SharedMemoryWeights():
            return read_shared_memory(source, limits)
        case GroupWeights():
            return groups.receive(source, timeout_s, limits)


__all__ = [
    "BACKENDS",
    "Background",
    "Sending",
    "SharedWeights",
    "WeightGroups",
    "WeightsGroup",
    "fetch",
    "host_and_port",
    "read_folder",
    "stamp_of",
]
