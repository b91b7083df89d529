"""Recipes of completions."""

from __future__ import annotations

from ....bus.control import ReplicaCapacity
from ....bus.parts.recipes import FingerprintCapacity
from ....bus.public import Fingerprint
from ....bus.recipes import RecipeParts
from . import Part, Resolved


class Recipes(Part):
    """Sends the parts of a recipe to streaming."""

    def __init__(self) -> None:
        self._executors: tuple[Fingerprint, ...] = ()

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        found = FingerprintCapacity.find(capacity.parts)
        self._executors = found.fingerprints if found is not None else ()

    def opened(self, resolved: Resolved) -> RecipeParts:
        _, request, adapter, prompt, sampling, pooling, seeds = resolved
        executors = self._executors
        return RecipeParts(
            request.tenant, adapter, sampling, seeds, prompt.media, pooling, executors
        )
