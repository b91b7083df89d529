"""Answers as a pipeline tells them: their text follows from their tokens, in chunks of any size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nano_inference.bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    FinishReason,
    GenerateRequest,
    Output,
    TokenLogprob,
)
from nano_inference.stages.streaming.stop_strings import StopStrings

from ..fake import completion
from ..sampled import WORDS

WEIGHTS = 3


class Spoken:
    """One sample.

    Attributes:
        texts: For each token the text that it makes certain; with the last comes the rest.
        token_ids: Those until it ended.
    """

    def __init__(self, request: GenerateRequest, index: int, token_ids: Sequence[int]):
        self._request = request
        self._index = index
        self.texts: list[str] = []
        self.token_ids: tuple[int, ...] = ()
        self.reason: FinishReason = "length"
        stops = StopStrings(request.sampling.stop)
        detokenizer = WORDS.detokenizer(skip_special=True)
        for token_id in token_ids:
            text, matched = stops.push(detokenizer.push((token_id,)))
            self.texts.append(text)
            self.token_ids += (token_id,)
            if matched:
                self.reason = "stop"
                break
        else:
            self.texts[-1:] = ["".join(self.texts[-1:]) + stops.finish() + detokenizer.finish()]

    def chunks(self, cuts: Sequence[int]) -> list[CompletionChunk]:
        """Cut after so many tokens each."""
        size = len(self.token_ids)
        places = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
        return [self._chunk(begin, end) for begin, end in pairwise(places)]

    def whole(self) -> CompletionSample:
        return CompletionSample(
            sample_index=self._index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            finish_reason=self.reason,
            weight_version=WEIGHTS,
            weight_versions=((WEIGHTS, 0), (WEIGHTS + 1, 4)) if len(self.token_ids) > 4 else (),
            top_logprobs=self._tops,
            ref_logprobs=self._logprobs,
            support_logprobs=self._logprobs,
        )

    @property
    def _logprobs(self) -> tuple[float, ...]:
        return tuple(-float(token_id) for token_id in self.token_ids)

    @property
    def _tops(self) -> tuple[tuple[TokenLogprob, ...], ...] | None:
        if not self._request.sampling.logprobs:
            return None
        found = zip(self.token_ids, self._logprobs, strict=True)
        return tuple((TokenLogprob(token_id=each, logprob=of),) for each, of in found)

    def _chunk(self, begin: int, end: int) -> CompletionChunk:
        tops = self._tops
        return CompletionChunk(
            request_id=self._request.request_id,
            entry_id="1-0",
            sample_index=self._index,
            token_offset=begin,
            token_ids=self.token_ids[begin:end],
            logprobs=self._logprobs[begin:end],
            text="".join(self.texts[begin:end]),
            finish_reason=self.reason if end == len(self.token_ids) else None,
            weight_version=WEIGHTS,
            top_logprobs=tops and tops[begin:end],
            support_logprobs=self._logprobs[begin:end],
        )


def spoken(
    request: GenerateRequest, answers: Sequence[Sequence[int]], cuts: Sequence[int]
) -> list[Output]:
    """A request's outputs: chunks of its samples in turn, where it is a stream, and its end."""
    samples = [Spoken(request, index, answer) for index, answer in enumerate(answers)]
    waiting = [each.chunks(cuts) if request.stream else [] for each in samples]
    outputs: list[Output] = []
    while any(waiting):
        outputs += [chunks.pop(0) for chunks in waiting if chunks]
    return [*outputs, completion(request, *(each.whole() for each in samples))]


def chunks_of(outputs: Sequence[Output], index: int) -> list[CompletionChunk]:
    """The chunks of a sample."""
    return [
        each for each in outputs if isinstance(each, CompletionChunk) and each.sample_index == index
    ]


def heard(outputs: Sequence[Output], index: int) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of a sample that has left in chunks."""
    chunks = chunks_of(outputs, index)
    texts = "".join(chunk.text for chunk in chunks)
    return texts, tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def end_of(outputs: Sequence[Output]) -> Completion:
    """The only terminal message, which is last."""
    (end,) = (each for each in outputs if isinstance(each, Completion))
    assert outputs[-1] is end
    return end
