"""Weights that come in several parts and are put in place together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ....bus.weights import StagedWeights
from ....config import WeightsError
from ..runner.weights.limits import UNLIMITED, WeightLimits


class Origin(NamedTuple):
    """A folder where tensors can be read again, as long as its files are those of the stamp."""

    folder: str
    stamp: str


class WeightParts:
    """The parts of one update: those of the last name that was given."""

    def __init__(self) -> None:
        self._update = ""
        self._parts = 0
        self._tensors: dict[str, Tensor] = {}
        self._origin: Origin | None = None
        # What the tensors hold at most: of one that came again, the former counts as well.
        self._num_bytes = 0

    def add(
        self,
        update: str,
        tensors: Mapping[str, Tensor],
        origin: Origin | None = None,
        limits: WeightLimits = UNLIMITED,
    ) -> None:
        """Keeps a part. Of a tensor that comes again the last one counts.

        Raises:
            WeightsError: All parts together are more than the limits allow.
        """
        if update != self._update:
            self.drop()
            self._update = update
        self._parts += 1
        self._origin = origin if self._parts == 1 else None
        self._tensors.update(tensors)
        self._num_bytes += _held(tensors)
        if self._num_bytes > limits.num_bytes:
            self._num_bytes = _held(self._tensors)
        limits.check_tensors(len(self._tensors))
        limits.check_bytes(self._num_bytes)

    def take(self, staged: StagedWeights) -> tuple[Mapping[str, Tensor], Origin | None]:
        """All tensors of an update, and their origin if they have one; keeps nothing any longer.

        Raises:
            WeightsError: Not all of its parts are here.
        """
        parts = self._parts if staged.update == self._update else 0
        tensors, origin = self._tensors, self._origin
        self.drop()
        if not parts or parts != staged.parts:
            raise WeightsError(
                f"{parts} of the update's {staged.parts} parts are here; send all of them again",
                code="weights_incomplete",
            )
        return tensors, origin

    def drop(self) -> None:
        """Keeps nothing."""
        self._update, self._parts, self._tensors, self._origin = "", 0, {}, None
        self._num_bytes = 0


def _held(tensors: Mapping[str, Tensor]) -> int:
    """The memory that is there as long as these tensors are, in bytes: they may be views."""
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
