"""Logprobs of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....bus.parts.scoring import PromptScores
from ....bus.public import CompletionChunk
from ..deliveries import Deliveries
from ..samples import RequestState, Sample, TokenLogprobs, token_logprobs
from ..step import Step
from . import Part

Known = tuple[list[float | None], list[TokenLogprobs]]
"""Logprobs of the prompt's tokens from the first token (None) on, and top logprobs there."""


class PromptLogprobs(Part):
    """Joins the logprobs that steps report of parts of a prompt."""

    reads = PromptScores

    def opened(self, request: RequestState, deliveries: Deliveries) -> None:
        self._set(request, ([None], [()]))

    def read(self, section: PromptScores, step: Step) -> Iterable[Sample]:
        for prompt in section.prompts:
            if (sample := step.find(prompt.seq_id)) is None:
                continue
            logprobs, tops = sample.request.notes[self]
            # After a preemption some come again.
            known = len(logprobs) - prompt.start
            logprobs += prompt.logprobs[known:]
            tops += map(token_logprobs, prompt.top_logprobs[known:])
            self._set(sample.request, (logprobs, tops))
        return ()

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        self._set(request, ([None], [()]))
        for chunk in chunks:
            if chunk.prompt_logprobs is not None:
                tops = list(chunk.prompt_top_logprobs or ())
                self._set(request, (list(chunk.prompt_logprobs), tops))

    def _set(self, request: RequestState, known: Known) -> None:
        request.notes[self] = logprobs, tops = known
        number = request.info.prompt_logprobs
        if number is None or len(logprobs) < len(request.info.prompt_token_ids):
            return
        request.prompt_fields["prompt_logprobs"] = tuple(logprobs)
        if number:
            request.prompt_fields["prompt_top_logprobs"] = tuple(tops)
