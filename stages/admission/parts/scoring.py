"""A reference model, which scores each sample."""

from __future__ import annotations

from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.scoring import ReferenceScoring
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....config import SamplingParams
from . import Part


class Reference(Part):
    """Requests scores of each generated sample."""

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> ReferenceScoring | None:
        return ReferenceScoring(sampling.temperature) if pooling is None else None
