"""The transports of new weights to the executor's process: a module for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ......bus.weights import (
    DeltaWeights,
    FolderWeights,
    GroupWeights,
    LocalWeights,
    SharedMemoryWeights,
    StagedWeights,
    WeightsSource,
    laid_down,
)
from ......config import WeightsError
from ...shards import NewWeight
from ..checks import UNLIMITED, WeightLimits, check_stored
from .folder import read_folder, read_folder_each
from .group import Sending as Sending
from .group import WeightGroups as WeightGroups
from .group import WeightsGroup as WeightsGroup
from .layout import Begin
from .shared_memory import SharedWeights as SharedWeights
from .shared_memory import read_shared_memory, read_shared_memory_each


def fetch(
    source: WeightsSource | StagedWeights,
    groups: WeightGroups,
    timeout_s: float,
    limits: WeightLimits = UNLIMITED,
) -> Mapping[str, NewWeight]:
    """Return the tensors of a source, by name, in memory of their own.

    Blocks; a wait for other processes ends after about `timeout_s`. An error leaves nothing behind.

    Raises:
        WeightsError: It is no source; or the tensors are missing, differ from the source's
            description, exceed the limits, or did not come in time.
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
        case DeltaWeights(tensors):
            limits.check_tensors(len(tensors))
            return {
                name: torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for name, data in tensors
                if data
            }
        case _:
            raise AssertionError(f"{type(source).__name__} is fetched elsewhere")


def fetch_each(
    source: WeightsSource | StagedWeights,
    groups: WeightGroups,
    timeout_s: float,
    limits: WeightLimits,
    begin: Begin,
) -> None:
    """Fetch the tensors like `fetch`, but hand over each when it has come, so that not all are in
    memory at once."""
    match source:
        case FolderWeights(path):
            read_folder_each(path, limits, begin)
        case SharedMemoryWeights():
            read_shared_memory_each(source, limits, begin)
        case GroupWeights():
            take = begin([meta.name for meta in source.tensors])
            groups.receive_each(source, timeout_s, limits, take)
        case _:
            tensors = fetch(source, groups, timeout_s, limits)
            check_stored(tensors)
            take = begin([*tensors])
            for name, tensor in tensors.items():
                assert isinstance(tensor, Tensor)  # no parts outside of groups
                take(name, tensor)
