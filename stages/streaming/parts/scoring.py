"""Logprobs of a reference model for finished samples."""

from __future__ import annotations

from collections.abc import Sequence

from ....bus.control import SampleScored, ScoreSample
from ....bus.parts.scoring import ReferenceScoring
from ....bus.public import CompletionChunk
from ..deliveries import Deliveries
from ..samples import RequestState, Sample
from . import Part


class ReferenceScores(Part):
    """Requests scores of each finished sample; a Completion waits for them."""

    handles = (SampleScored,)

    def finished(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        request = sample.request
        if (score := self._score(request, sample.index)) is not None:
            request.waits.add(sample.index)
            deliveries.to_score.append(score)

    def handle(self, message: SampleScored, request: RequestState, deliveries: Deliveries) -> None:
        """Set the logprobs of a sample. Repeated scores are ignored."""
        index, logprobs = message.sample_index, message.logprobs
        if index not in request.waits:
            return
        request.waits.remove(index)
        if logprobs:
            sample = request.samples[index]
            split = len(logprobs) - len(sample.token_ids)
            sample.fields["ref_logprobs"] = logprobs[split:]
            if _with_prompt(request, index):
                request.prompt_fields["prompt_ref_logprobs"] = (None, *logprobs[:split])

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        if ReferenceScoring.find(request.info.parts) is not None:
            ended = [each for each in request.samples.values() if each.finish_reason is not None]
            request.waits.update(sample.index for sample in ended)

    def unanswered(self, request: RequestState) -> list[ScoreSample]:
        scores = (self._score(request, index) for index in sorted(request.waits))
        return [score for score in scores if score is not None]

    def _score(self, request: RequestState, index: int) -> ScoreSample | None:
        """Return the message for a sample; None without a reference model.

        The first sample's includes the prompt if the request wants the prompt's logprobs.
        """
        info, prompt = request.info, request.info.prompt_token_ids
        if (reference := ReferenceScoring.find(info.parts)) is None:
            return None
        return ScoreSample(
            request_id=info.request_id,
            entry_id=info.entry_id,
            sample_index=index,
            token_ids=(*prompt, *request.samples[index].token_ids),
            start=1 if _with_prompt(request, index) else len(prompt),
            temperature=reference.temperature,
        )


def _with_prompt(request: RequestState, index: int) -> bool:
    return index == 0 and request.info.prompt_logprobs is not None
