"""Logprobs of prompts, and of targets in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ....bus.parts.scoring import PromptScores
from ....bus.public import CompletionChunk
from ..deliveries import Deliveries
from ..samples import RequestState, Sample, TokenLogprobs, token_logprobs
from ..step import Step
from . import Part


@dataclass(slots=True, eq=False)
class Known:
    """The logprobs of a prompt that are known.

    Attributes:
        logprobs: Of its tokens from the first on, as in Completion.
        tops: Top logprobs at the same positions.
        ranks: Their ranks, if there are top logprobs.
        targets: As Completion's `prompt_token_id_logprobs`.
    """

    logprobs: list[float | None] = field(default_factory=list)
    tops: list[TokenLogprobs] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    targets: bytearray = field(default_factory=bytearray)

    def set_in(self, request: RequestState) -> None:
        """Set the fields of the Completion that are complete."""
        info, fields = request.info, request.prompt_fields
        number = info.prompt_logprobs
        if number is not None and len(self.logprobs) >= len(info.prompt_token_ids):
            fields["prompt_logprobs"] = tuple(self.logprobs)
            if number:
                fields["prompt_top_logprobs"] = tuple(self.tops)
                fields["prompt_token_ranks"] = tuple(self.ranks)
        if info.num_targets is not None and len(self.targets) >= 4 * info.num_targets:
            fields["prompt_token_id_logprobs"] = bytes(self.targets)


class PromptLogprobs(Part):
    """Joins the logprobs that steps report of parts of a prompt."""

    reads = PromptScores

    def opened(self, request: RequestState, deliveries: Deliveries) -> None:
        if _is_scored(request):
            self._begin(request)

    def read(self, section: PromptScores, step: Step) -> Iterable[Sample]:
        # After a preemption some come again.
        for prompt in section.prompts:
            if (sample := step.find(prompt.seq_id)) is not None:
                known: Known = sample.request.notes[self]
                new = len(known.logprobs) - prompt.start
                known.logprobs += prompt.logprobs[new:]
                known.tops += map(token_logprobs, prompt.top_logprobs[new:])
                known.ranks += prompt.ranks[new:]
                known.set_in(sample.request)
        for targets in section.targets:
            if (sample := step.find(targets.seq_id)) is not None:
                known = sample.request.notes[self]
                known.targets += targets.logprobs[len(known.targets) - 4 * targets.first :]
                known.set_in(sample.request)
        return ()

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        if not _is_scored(request):
            return
        known = self._begin(request)
        for chunk in chunks:
            if chunk.prompt_logprobs is not None:
                known.logprobs = [*chunk.prompt_logprobs]
                known.tops = [*(chunk.prompt_top_logprobs or ())]
                known.ranks = [*(chunk.prompt_token_ranks or ())]
            if chunk.prompt_token_id_logprobs is not None:
                known.targets = bytearray(chunk.prompt_token_id_logprobs)
        known.set_in(request)

    def _begin(self, request: RequestState) -> Known:
        """Return what is known of a prompt before its first step."""
        info, known = request.info, Known()
        if info.prompt_logprobs is not None:
            without = min(info.prompt_logprob_start + 1, len(info.prompt_token_ids))
            known.logprobs, known.tops = [None] * without, [()] * without
            known.ranks = [None] * without
        request.notes[self] = known
        known.set_in(request)
        return known


def _is_scored(request: RequestState) -> bool:
    return request.info.prompt_logprobs is not None or request.info.num_targets is not None
