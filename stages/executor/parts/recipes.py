"""Recipes of completions: the executor's fingerprint."""

from __future__ import annotations

from ....bus.control import ReplicaCapacity
from ....bus.parts.recipes import FingerprintCapacity
from ....bus.sections import with_sections
from ..fingerprint import fingerprint
from . import ExecutorState, Part
from .weights import WeightChanges


class Recipes(Part):
    """The fingerprint, of the time at which the model was loaded."""

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        version = state.parts.get(WeightChanges).manager.version
        self.fingerprint = fingerprint(
            state.config, state.model, state.runner, weight_version=version
        )

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return with_sections(found, FingerprintCapacity((self.fingerprint,)))
