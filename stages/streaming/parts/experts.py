"""Routed experts of prompts; those of sampled tokens are a column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....bus.parts.experts import PromptExperts, RoutedPrompts
from ....bus.public import CompletionChunk, RoutedExperts
from ..samples import RequestState, Sample
from ..step import Step
from . import Part

_FIELD = "prompt_routed_experts"


class PromptRouting(Part):
    """Joins the experts that steps report of parts of a prompt."""

    reads = RoutedPrompts

    def read(self, section: RoutedPrompts, step: Step) -> Iterable[Sample]:
        for each in section.prompts:
            if (sample := step.find(each.seq_id)) is not None:
                self._add(sample.request, each)
        return ()

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        for chunk in chunks:
            if chunk.prompt_routed_experts is not None:
                request.prompt_fields[_FIELD] = chunk.prompt_routed_experts

    def _add(self, request: RequestState, part: PromptExperts) -> None:
        if _FIELD in request.prompt_fields:
            return
        first, data = request.notes.setdefault(self, (part.first, bytearray()))
        # After a preemption some come again.
        known = len(data) - (part.first - first) * 2 * part.layers * part.top_k
        data += part.data[known:]
        if part.ended:
            request.prompt_fields[_FIELD] = RoutedExperts(
                first=first, layers=part.layers, top_k=part.top_k, data=bytes(data)
            )
