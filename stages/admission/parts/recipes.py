"""Recipes of completions."""

from __future__ import annotations

from ....bus.control import ReplicaCapacity
from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.recipes import FingerprintCapacity
from ....bus.pooling import Pooling
from ....bus.public import Fingerprint, GenerateRequest
from ....bus.recipes import RecipeParts
from ....config import SamplingParams
from . import Part


class Recipes(Part):
    """Sends the parts of a recipe to streaming."""

    def __init__(self) -> None:
        self._executors: tuple[Fingerprint, ...] = ()

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        found = FingerprintCapacity.find(capacity.parts)
        self._executors = found.fingerprints if found is not None else ()

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> RecipeParts:
        executors = self._executors
        return RecipeParts(
            request.tenant, adapter, sampling, seeds, prompt.media, pooling, executors
        )
