"""Weights that come in several parts and are put in place together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...bus.weights import StagedWeights
from ...config import WeightsError


class WeightParts:
    """The parts of one update: those of the last name that was given."""

    def __init__(self) -> None:
        self._update = ""
        self._parts = 0
        self._tensors: dict[str, Tensor] = {}

    def add(self, update: str, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a part. Of a tensor that comes again the last one counts."""
        if update != self._update:
            self._update, self._parts, self._tensors = update, 0, {}
        self._parts += 1
        self._tensors.update(tensors)

    def take(self, staged: StagedWeights) -> Mapping[str, Tensor]:
        """All tensors of an update; nothing is kept any longer.

        Raises:
            WeightsError: Not all of its parts are here.
        """
        parts = self._parts if staged.update == self._update else 0
        tensors = self._tensors
        self.drop()
        if parts != staged.parts:
            raise WeightsError(
                f"{parts} of the update's {staged.parts} parts are here; send all of them again",
                code="weights_incomplete",
            )
        return tensors

    def drop(self) -> None:
        """Keeps nothing."""
        self._update, self._parts, self._tensors = "", 0, {}
