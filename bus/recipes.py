"""Streaming's parts of a Completion's recipe."""

from __future__ import annotations

from ..config import SamplingParams
from .pooling import Pooling
from .public import Completion, EmbedParams, Fingerprint, Recipe
from .sections import Section


class RecipeParts(Section, frozen=True):
    """In RequestOpened: parts of a recipe, which streaming makes, since passing them on is faster.

    Attributes:
        images: As in Prompt.media.
        pooling: None for a request that generates.
    """

    tenant: str
    adapter: str
    sampling: SamplingParams
    seeds: tuple[int, ...]
    images: tuple[str, ...]
    pooling: Pooling | None
    executors: tuple[Fingerprint, ...]

    def recipe(self) -> Recipe:
        """Return the recipe."""
        pooling, sampling = self.pooling, self.sampling
        return Recipe(
            tenant=self.tenant,
            adapter=self.adapter,
            sampling=SamplingParams() if pooling else sampling,
            seeds=self.seeds if sampling.temperature else (),
            images=self.images,
            embed=None if pooling is None else _asked(pooling),
            executors=self.executors,
        )


def _asked(pooling: Pooling) -> EmbedParams:
    return EmbedParams(
        pooling=pooling.kind, normalize=pooling.normalize, dimensions=pooling.dimensions
    )


def has_id(completion: Completion, id: str) -> bool:
    """Return whether an id is that of a completion's request, entry or trace; or of its call over
    HTTP, whose requests are `ID_0`, `ID_1` and so on."""
    own = completion.request_id
    if id in (own, completion.entry_id, completion.trace_id):
        return True
    return own.startswith(f"{id}_") and own[len(id) + 1 :].isdecimal()
