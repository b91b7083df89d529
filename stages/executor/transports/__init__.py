"""The ways by which new weights reach the executor's process: a module for each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ....bus.weights import FolderWeights, LocalWeights, WeightsSource, pick_up
from ....config import WeightsError
from .folder import read_folder


def fetch(source: WeightsSource, timeout_s: float) -> Mapping[str, Tensor]:
    """The tensors of a source, by name, in memory that nobody else writes to.

    Blocks, at most about `timeout_s`. What fails leaves nothing behind.

    Raises:
        WeightsError: They are not there, are not what the source says, or did not come in time.
    """
    match source:
        case FolderWeights(path):
            return read_folder(path)
        case LocalWeights(key):
            if (weights := pick_up(key)) is None:
                raise WeightsError(
                    "the weights are not in the executor's process; send them through shared "
                    "memory, a group or a folder"
                )
            return weights
        case _:
            raise WeightsError("no such source")


__all__ = ["fetch"]
