"""The part of batching that tracks the images whose embeddings the executor has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .....bus.control import ImageCapacity, MemoryState, ReplicaCapacity, WeightsReady
from .....bus.messages import AdmittedRequest
from .....bus.parts.images import ImagesResult, PromptMedia
from .....bus.steps import StepSummary
from .....config import EngineConfig
from ...plans import PlanDraft, SentPlan
from ...sequence import Sequence
from .. import Core, Part
from .cache import ImageCache, StepImages, images_of
from .keys import KeyIds, place


class Images(Part):
    """Encodes the images of prompts before the steps that need them.

    Attributes:
        cache: The executor's embeddings.
    """

    handles = (WeightsReady, MemoryState)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        own = ImageCapacity.find(capacity.parts)
        assert own is not None
        self.cache = ImageCache(own)
        # With the next plan, embeddings go with the weights, or with their memory.
        self._replaced = self._released = False

    def receive(
        self, message: WeightsReady | MemoryState, now_ns: int, deadline_ns: int | None
    ) -> None:
        if isinstance(message, WeightsReady):
            self._replaced = True
        else:
            self._released = bool(message.release)

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        media = PromptMedia.find(request.parts)
        if media is not None and media.items:
            images = place(media.items, request.prompt.token_ids)
            seq.extras["images"] = images
            seq.num_indivisible = max(item.num_tokens for item in media.items)
            seq.allocation.token_ids = KeyIds(seq.token_ids, images)

    def start(self, seq: Sequence, new: dict[str, Any]) -> None:
        if images := images_of(seq):
            new["parts"] += (PromptMedia(tuple([image.item for image in images])),)

    def begin(self, now_ns: int) -> None:
        if self._replaced or self._released:
            self.cache.clear()
            self._replaced = self._released = False

    def limit(self) -> StepImages:
        return StepImages(self.cache)

    def fit(self, draft: PlanDraft) -> None:
        draft.num_tokens, section = self.cache.plan(draft.num_tokens, self.core.index)
        if section.forgotten or section.encodes:
            draft.parts.append(section)

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        if (found := ImagesResult.find(result.parts)) is not None:
            self.cache.spoil(map(self.core.index.get, found.spoiled))
        return ()

    def lose(self) -> None:
        self.cache.clear()

    def reset(self) -> None:
        self._replaced = self._released = False

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        numbers = {"encoded": self.cache.take_encoded(), "kept_tokens": self.cache.num_tokens}
        return {"images": numbers}
