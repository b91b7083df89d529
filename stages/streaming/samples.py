"""What one request, and each of its samples, has produced so far."""

from __future__ import annotations

import sys
from array import array

from ...bus.messages import (
    PromptLogprobs,
    RequestOpened,
    RowFinish,
    TopLogprobs,
)
from ...bus.pooling import PooledPrompt
from ...bus.public import (
    CompletionChunk,
    CompletionSample,
    FinishReason,
    StageTime,
    TokenLogprob,
)
from ...bus.scoring import SampleScored, ScoreSample
from ...text.detokenizer import Detokenizer, Pieces
from .stop_strings import StopStrings

TokenLogprobs = tuple[TokenLogprob, ...]


class RequestState:
    """A request in flight.

    Attributes:
        samples: Those that have started, by index.
        unfinished: How many of the n samples have not finished, started or not.
        cached_tokens: Prompt tokens that needed no computing, summed over the samples.
        queued: When fairness held it; None if unknown.
        executed_ns: When the first step with any of its samples began on the device; 0 before.
        step_end_ns: When the last step with any of its samples had its tokens on the host.
        first_step_end_ns: The same of the first step that brought a token, or the prompt's vector;
            0 before.
        first_token_ns: When that token came here; 0 before.
        last_token_ns: When the last one so far did.
        prompt_logprobs: Those of the prompt's tokens that are known, from the first token on, of
            which there is none.
        prompt_top_logprobs: The likeliest tokens at the same places.
        restored: It was begun by a predecessor of this stage, so that the times are not known.
        unscored: Finished samples that the reference model is still to score, by index.
        prompt_ref_logprobs: Of the prompt, by that model; None while it is not known.
    """

    __slots__ = (
        "cached_tokens",
        "executed_ns",
        "first_step_end_ns",
        "first_token_ns",
        "info",
        "last_token_ns",
        "prompt_logprobs",
        "prompt_ref_logprobs",
        "prompt_top_logprobs",
        "queued",
        "restored",
        "samples",
        "step_end_ns",
        "unfinished",
        "unscored",
    )

    def __init__(self, info: RequestOpened) -> None:
        self.info = info
        self.samples: dict[int, Sample] = {}
        self.unfinished = info.n
        self.cached_tokens = 0
        self.executed_ns = 0
        self.queued: StageTime | None = None
        self.step_end_ns = 0
        self.first_step_end_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.prompt_logprobs: list[float | None] = [None]
        self.prompt_top_logprobs: list[TokenLogprobs] = [()]
        self.restored = False
        self.prompt_ref_logprobs: tuple[float | None, ...] | None = None
        self.unscored: set[int] = set()

    def absorb_prompt(self, prompt: PromptLogprobs) -> None:
        """Takes logprobs of the prompt. After a preemption some come again, and count once."""
        known = len(self.prompt_logprobs) - prompt.start
        self.prompt_logprobs += prompt.logprobs[known:]
        self.prompt_top_logprobs += map(token_logprobs, prompt.top_logprobs[known:])

    def restore_prompt(self, chunk: CompletionChunk) -> None:
        """Takes the logprobs of the prompt that were delivered before."""
        self.prompt_logprobs = list(chunk.prompt_logprobs or ())
        self.prompt_top_logprobs = list(chunk.prompt_top_logprobs or ())

    def scored_prompt(
        self,
    ) -> tuple[tuple[float | None, ...] | None, tuple[TokenLogprobs, ...] | None]:
        """A Completion's `prompt_logprobs` and `prompt_top_logprobs`; None where not asked for."""
        wanted, size = self.info.prompt_logprobs, len(self.info.prompt_token_ids)
        if wanted is None or len(self.prompt_logprobs) < size:
            return None, None
        return tuple(self.prompt_logprobs), tuple(self.prompt_top_logprobs) if wanted else None

    def finish(self, sample: Sample) -> None:
        """A sample has finished, and is to be scored where there is a reference model."""
        self.unfinished -= 1
        if self.info.ref_temperature is not None:
            self.unscored.add(sample.index)

    def to_score(self, index: int) -> ScoreSample:
        """The question to the reference model about a sample that has finished.

        It asks for the completion's logprobs, and with the first sample for the prompt's too, if
        those are wanted.
        """
        info, prompt = self.info, self.info.prompt_token_ids
        assert info.ref_temperature is not None
        return ScoreSample(
            request_id=info.request_id,
            entry_id=info.entry_id,
            sample_index=index,
            token_ids=(*prompt, *self.samples[index].token_ids),
            start=1 if self._scores_prompt(index) else len(prompt),
            temperature=info.ref_temperature,
        )

    def absorb_scored(self, scored: SampleScored) -> None:
        """Takes the reference model's logprobs of a sample."""
        if scored.sample_index not in self.unscored:
            return  # asked for twice, as after a failure
        self.unscored.remove(scored.sample_index)
        if scored.logprobs:
            sample = self.samples[scored.sample_index]
            split = len(scored.logprobs) - len(sample.token_ids)
            sample.ref_logprobs = scored.logprobs[split:]
            if self._scores_prompt(scored.sample_index):
                self.prompt_ref_logprobs = (None, *scored.logprobs[:split])

    def _scores_prompt(self, index: int) -> bool:
        return index == 0 and self.info.prompt_logprobs is not None

    def add(self, index: int, pieces: Pieces) -> Sample:
        """A new sample of this request."""
        sample = self.samples[index] = Sample(self, index, pieces)
        return sample


class Sample:
    """One sample.

    Attributes:
        seq_id: The sequence that makes it; another one in each epoch.
        token_ids: All tokens, also those whose text is not shown (stop tokens, and tokens of a
            stop string).
        logprobs: Of each token.
        finish_reason: None while it goes on.
        ref_logprobs: By the reference model; None while they are not known.
        weight_version: Of the weights that made the last token; -1 before the first one.
        adapter_version: Of the adapter that made the last token; 0 when there is none.
        embedding: The prompt's vector, where that was asked for and is there.
        num_draft_tokens: Drafted tokens that were verified, as far as this object was told.
        num_accepted_draft_tokens: Those of them that were what was sampled.
    """

    __slots__ = (
        "_detokenizer",
        "_first_adapter_version",
        "_live",
        "_num_read",
        "_reports",
        "_stops",
        "_texts",
        "_top_logprobs",
        "_weight_versions",
        "adapter_version",
        "embedding",
        "finish_reason",
        "index",
        "logprobs",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "ref_logprobs",
        "request",
        "seq_id",
        "token_ids",
        "weight_version",
    )

    def __init__(self, request: RequestState, index: int, pieces: Pieces) -> None:
        self.request = request
        self.index = index
        self.seq_id = -1
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.ref_logprobs: tuple[float, ...] | None = None
        self.embedding: tuple[float, ...] | None = None
        self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.logprobs: list[float] = []
        self._texts: list[str] = []
        self._top_logprobs: list[TokenLogprobs] = []
        self._weight_versions: list[tuple[int, int]] = []
        self.weight_version = -1
        self.adapter_version = self._first_adapter_version = 0
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(request.info.stop) if request.info.stop else None
        self._reports = request.info.logprobs > 0
        # Whether somebody looks at the text of each token. If not it is made at the end, in one go.
        self._live = request.info.stream or self._stops is not None
        # Where not: of so many tokens the text is made.
        self._num_read = 0

    def advance(
        self,
        token_id: int,
        logprob: float,
        reason: RowFinish,
        weight_version: int,
        top_logprobs: TopLogprobs = (),
        adapter_version: int = 0,
    ) -> str:
        """Takes the next token; returns the text that is now certain and sets `finish_reason`.

        A stop token ("stop" from the executor) counts, but its text is never shown, special token
        or not; vLLM does the same. A stop string turns any reason into "stop", but the text of
        the first `min_tokens` tokens is none of its business, not even as a beginning.

        It runs for each token of each sample, so what only some of them need stands behind a look
        at one attribute. Without a stream and stop strings all text comes with the last token.

        Args:
            token_id: As the executor reported it, and so are the others.
            logprob: Of the token.
            reason: Why the sample ends with it; "" when it goes on.
            weight_version: Of the weights that made it.
            top_logprobs: Empty when none were asked for.
            adapter_version: Of the adapter that it was made with; 0 without one.
        """
        if weight_version != self.weight_version or adapter_version != self.adapter_version:
            self._change_versions(weight_version, adapter_version)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self._reports:
            self._top_logprobs.append(token_logprobs(top_logprobs))
        if not (reason or self._live):
            return ""
        text, matched = "", False
        if not self._live:
            text = self._read(len(self.token_ids) - (reason == "stop"))
        elif reason != "stop":
            text, matched = self._advance_text(token_id)
        if matched:
            self.finish_reason = "stop"
        elif reason:
            self.finish_reason = reason
            text += self._rest()
        if text:
            self._texts.append(text)
        return text

    def pool(self, prompt: PooledPrompt, weight_version: int) -> None:
        """Takes the prompt's vector, with which the sample ends."""
        vector = array("f", prompt.vector)
        if sys.byteorder == "big":
            vector.byteswap()
        self.embedding = tuple(vector)
        self._weight_versions = [(weight_version, 0)]
        self.adapter_version = self._first_adapter_version = prompt.adapter_version
        self.finish_reason = "stop"

    def restore(self, chunk: CompletionChunk) -> None:
        """Takes tokens that were delivered before, by this process or another.

        Text follows from tokens alone, so detokenizer and stop strings get where they were.
        """
        tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        if chunk.token_ids:
            self._change_versions(chunk.weight_version, chunk.adapter_version)
        for token_id, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            if self._reports:
                self._top_logprobs.append(top)
            if chunk.finish_reason is None:
                self._advance_text(token_id)
        self._num_read = len(self.token_ids)
        self._texts.append(chunk.text)
        self.finish_reason = chunk.finish_reason

    def abort(self) -> str:
        """Ends the sample where it is; returns the text that was held back."""
        self.finish_reason = "abort"
        text = ("" if self._live else self._read(len(self.token_ids))) + self._rest()
        self._texts.append(text)
        return text

    def result(self) -> CompletionSample:
        """The finished sample. Its weight version is that of its first token, the oldest one."""
        spans = tuple(self._weight_versions)
        return CompletionSample(
            sample_index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            weight_version=spans[0][0] if spans else 0,
            weight_versions=spans if self.token_ids else (),
            top_logprobs=self.top_logprobs(0),
            ref_logprobs=self.ref_logprobs,
            adapter_version=self._first_adapter_version,
            embedding=self.embedding,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
        )

    def top_logprobs(self, first: int) -> tuple[TokenLogprobs, ...] | None:
        """The likeliest tokens at each place from the `first` one on; None when not asked for."""
        return tuple(self._top_logprobs[first:]) if self._reports else None

    def _change_versions(self, weight_version: int, adapter_version: int) -> None:
        """Of the weights and the adapter that make the tokens from the next one on."""
        if weight_version != self.weight_version:
            self.weight_version = weight_version
            self._weight_versions.append((weight_version, len(self.token_ids)))
        if not self.token_ids:
            self._first_adapter_version = adapter_version
        self.adapter_version = adapter_version

    def _read(self, end: int) -> str:
        """The text of the tokens up to there of which it is not made."""
        start, self._num_read = self._num_read, end
        return self._detokenizer.push(self.token_ids[start:end])

    def _advance_text(self, token_id: int) -> tuple[str, bool]:
        """The text that the last token makes certain, and whether a stop string ends it there."""
        text = self._detokenizer.push((token_id,))
        if self._stops is None or len(self.token_ids) <= self.request.info.min_tokens:
            return text, False
        return self._stops.push(text)

    def _rest(self) -> str:
        """The text ends: an incomplete character, and what looked like a stop string's beginning.

        U+FFFD for that character is no text of the model's, so it completes no stop string.
        """
        incomplete = self._detokenizer.finish()
        held = self._stops.finish() if self._stops is not None else ""
        return held + incomplete


def token_logprobs(top: TopLogprobs) -> TokenLogprobs:
    """From the messages between stages to the public ones."""
    return tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in top)
